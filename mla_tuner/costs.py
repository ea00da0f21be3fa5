"""What tuning a bucket will take, reckoned from those that are done."""

from __future__ import annotations

import math
from typing import NamedTuple

from .measure import DUEL, SEARCH, Runners
from .plan import MLX
from .shapes import Shape

TRIAL_CONTEXT = 1024  # tokens of the trial that tells how fast `mlx` is before anything is tuned
SAMPLED_S = SEARCH.seconds + DUEL.seconds  # of a bucket, at most, where calls are short
CALLS = 10  # of MLX's path in a bucket: a check, two search rounds, six of the duel, slack


class Cost(NamedTuple):
    """Seconds that a shape took, see `Costs.add`, and those of them in which MLX's path ran."""

    shape: Shape
    seconds: float
    default: float


class Costs:
    """The calls of MLX's path grow with their operations. All the rest of a bucket is a search in
    samples of fixed length, so a longer context adds little to it.
    """

    def __init__(self, runners: Runners) -> None:
        self.runners = runners
        self.known: list[Cost] = []
        self._first: Cost | None = None  # by trial

    def add(self, shape: Shape, seconds: float, default_s: float) -> None:
        """seconds: without what was compiled once for all. default_s: of one call of the baseline,
        MLX's path.
        """
        self.known.append(Cost(shape, seconds, min(seconds, CALLS * default_s)))

    def estimate(self, shape: Shape) -> float:
        """Seconds, from the nearest known shape; of the same dtype where there is one."""
        known = self.known
        if not known:
            self._first = self._first or self._trial(shape)
            known = [self._first]

        def distance(cost: Cost) -> tuple[bool, float]:
            return cost.shape.dtype != shape.dtype, abs(math.log(shape.flop / cost.shape.flop))

        near = min(known, key=distance)
        return near.seconds - near.default + near.default * shape.flop / near.shape.flop

    def _trial(self, shape: Shape) -> Cost:
        """Before anything is known: `mlx` on a short context of a single sequence."""
        small = Shape(
            *(min(shape.context, TRIAL_CONTEXT), 1, shape.heads, shape.dtype),
            *(shape.geometry, shape.q_len, shape.layout),
        )
        try:
            runner = self.runners(small, 0)
            runner.sample(MLX, 1)  # warm-up
            seconds = CALLS * runner.sample(MLX, 1)[0]
        except Exception:  # it will fail again, and be recorded, when its bucket is measured
            seconds = 0.0
        return Cost(small, seconds, seconds)
