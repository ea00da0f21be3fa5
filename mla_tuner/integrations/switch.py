"""What MLA_TUNER=force makes of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import backends
from .. import device as devices
from ..candidates import candidates
from ..plan import Decision, Plan
from ..shapes import CONTEXT_GRID, DEEPSEEK, Bucket, Geometry, bucket_of

if TYPE_CHECKING:
    from ..policy import Policy


class Forced:
    """A policy that answers with our kernel wherever one can run, faster or not.

    Its plan is that of `policy` where that is native, else the one that the tuner would try first.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._device = devices.probe()
        self._plans: dict[Bucket, Plan | None] = {}

    def decide(
        self,
        context: int,
        batch: int,
        heads: int,
        dtype: str,
        q_len: int = 1,
        geometry: Geometry = DEEPSEEK,
        layout: str = "paged",
    ) -> Decision:
        decision = self._policy.decide(context, batch, heads, dtype, q_len, geometry, layout)
        if decision.plan.native:
            return decision
        bucket = bucket_of(context, batch, heads, dtype, geometry, q_len, layout)
        if not bucket.context:  # outside the grid, where nothing is tuned
            bucket = bucket._replace(context=max(1, min(context, CONTEXT_GRID[-1])))
        if bucket not in self._plans:
            self._plans[bucket] = self._first_native(bucket)
        plan = self._plans[bucket]
        if plan is None:
            return decision
        reason = f"MLA_TUNER=force: instead of {decision.plan} ({decision.source})"
        return Decision(plan, "caller", reason)

    def _first_native(self, bucket: Bucket) -> Plan | None:
        plans = candidates(bucket, self._device, backends.get(self._device.backend))
        return next((plan for plan in plans if plan.native), None)
