"""What to run for a shape, and why: a question that an engine's own dispatch can ask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..plan import Decision
from ..shapes import CONTEXT_GRID, Shape, effective_batch

if TYPE_CHECKING:
    from ..policy import Policy, Step


@dataclass(frozen=True)
class Answer:
    """The decision for a shape, the device that it holds for, and what it would be elsewhere.

    thresholds: path by the context from which it runs, for this batch, heads and dtype; the first
    context is 0. steps: the look-up step by step, each with its reason; one answered.
    """

    device: str
    decision: Decision
    thresholds: dict[int, str]
    steps: tuple[Step, ...]

    @property
    def partitions(self) -> int:
        """Pieces that the longest context is cut in; 1 where nothing is split."""
        return self.decision.plan.partitions

    def __str__(self) -> str:
        starts = ", ".join(f"{path} from {start}" for start, path in self.thresholds.items())
        plan, reason = self.decision.plan, self.decision.reason
        return f"{plan} on {self.device} ({self.decision.source}: {reason}); {starts}"


def plan_for(shape: Shape, policy: Policy | None = None) -> Answer:
    """The plan for a shape with its device, thresholds and reasons; runs nothing.

    policy: who decides; without it the policy of this process. Not for the hot path: it asks about
    every context of the grid. `policy.decide` is the look-up alone.
    """
    if policy is None:
        from .. import policy as policies  # not at import: it brings sqlite3 and the device probe

        policy = policies.current()
    batch = effective_batch(shape.all_lengths)
    rest = batch, shape.heads, shape.dtype, shape.q_len, shape.geometry, shape.layout
    decision = policy.decide(shape.context, *rest)
    thresholds = _thresholds(lambda context: policy.decide(context, *rest).plan.path)
    steps = tuple(policy.explain(shape.context, *rest))
    return Answer(policy.device.key, decision, thresholds, steps)


def _thresholds(path_at: Callable[[int], str]) -> dict[int, str]:
    """The path by the first context that it runs at, to the token."""
    found = {0: path_at(0)}
    for low, high in pairwise((0, *CONTEXT_GRID, 2 * CONTEXT_GRID[-1])):
        path = path_at(high)
        if path != path_at(low):
            between = range(low + 1, high)
            found[low + 1 + bisect_left(between, True, key=lambda at: path_at(at) == path)] = path
    return found
