"""Runners that play a recording back: the real tuner and policy on a machine that isn't there."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import exp, log
from statistics import median

from mla_tuner.candidates import row_groups
from mla_tuner.measure import Checked
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

from .devices import StandIn
from .recording import Recording, Sweep
from .simulate import CHECK_CALLS, CHECK_S, Clock


class Played:
    """One sweep without holes.

    Where a plan was not timed in a round, its median stands in, scaled by how fast the other plans
    were in that round. Partition counts between recorded ones are interpolated in log-log.
    """

    def __init__(self, sweep: Sweep, cores: int) -> None:
        self.shape, self.first_us, self.cores = sweep.shape, sweep.first_us, cores
        self.rounds = sweep.rounds
        middle = {
            plan: median(t for t in row if t is not None) for plan, row in sweep.samples.items()
        }
        whole = [plan for plan, row in sweep.samples.items() if None not in row]
        level = [
            median((sweep.samples[plan][at] or 0.0) / middle[plan] for plan in whole)
            for at in range(self.rounds)
        ]
        self.samples: Mapping[Plan, tuple[float, ...]] = {
            plan: tuple(middle[plan] * level[at] if t is None else t for at, t in enumerate(row))
            for plan, row in sweep.samples.items()
        }
        self.median_us = {plan: median(row) for plan, row in self.samples.items()}

    def known(self, plan: Plan) -> bool:
        """Whether the recording holds it."""
        return plan in self.samples

    def executed(self, plan: Plan) -> Plan:
        """What runs when this plan is asked for: a short context is cut in fewer pieces."""
        whole = replace(plan, tile=plan.tile or self.tiles[0]) if plan.native else plan
        return whole.cut(self.shape.context)

    @cached_property
    def tiles(self) -> tuple[str, ...]:
        """Recorded tiles, the default first."""
        return tuple(dict.fromkeys(plan.tile for plan in self.samples if plan.native))

    def us(self, plan: Plan, at: int | None = None) -> float:
        """Microseconds of a plan in round `at`; its median without one.

        Raises:
            ValueError: its partition count lies beyond those recorded.
        """
        plan = self.executed(plan)
        if plan in self.samples:
            return self.median_us[plan] if at is None else self.samples[plan][at]
        return exp(sum(share * log(self.us(near, at)) for near, share in self._between(plan)))

    def _between(self, plan: Plan) -> list[tuple[Plan, float]]:
        """The recorded plans that stand in for one between them, and each one's share.

        Times jump where a wave ends: a neighbour with other waves than the plan says nothing.
        """
        counts = sorted(p.partitions for p in self.samples if p.native and p.tile == plan.tile)
        place = bisect_left(counts, plan.partitions)
        if not 0 < place < len(counts):
            raise ValueError(f"{plan} lies beyond what was recorded at {self.shape}")
        low, high = (self._of(counts[i], plan.tile) for i in (place - 1, place))
        alike = [near for near in (low, high) if self._waves(near) == self._waves(plan)]
        if len(alike) == 1:
            return [(alike[0], 1.0)]
        share = log(plan.partitions / low.partitions) / log(high.partitions / low.partitions)
        return [(low, 1 - share), (high, share)]

    def _waves(self, plan: Plan) -> int:
        tasks = row_groups(self.shape.rows, plan.tile) * self.shape.batch * plan.partitions
        return -(-tasks // self.cores)

    def _of(self, partitions: int, tile: str) -> Plan:
        return Plan("single" if partitions == 1 else "split", partitions, tile)

    def best(self, rounds: Sequence[int]) -> Plan:
        """The oracle: the lowest median of the whole sweep in those rounds."""
        return min(self.samples, key=lambda plan: self.median(plan, rounds))

    def median(self, plan: Plan, rounds: Sequence[int]) -> float:
        """Microseconds, over some of the rounds."""
        return median(self.us(plan, at) for at in rounds)


class RecordedRunner:
    """Draws recorded rounds at random, the same one for all plans until one comes again."""

    queued = False

    def __init__(self, played: Played, clock: Clock, rng: random.Random) -> None:
        self.played, self.clock, self.rng = played, clock, rng
        self._at = 0
        self._seen: set[Plan] = set()

    def check(self, plan: Plan) -> Checked:
        """Right when it was recorded, hence right now."""
        us = self.played.first_us.get(plan, self.played.us(plan))
        self.clock.now += CHECK_S + (us + (CHECK_CALLS - 1) * self.played.us(plan)) * 1e-6
        return Checked(True, 0.0, "", us * 1e-6)

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        """A recorded time. A plan that comes again opens a new round."""
        if plan in self._seen or not self._seen:
            self._at = self.rng.randrange(self.played.rounds)
            self._seen.clear()
        self._seen.add(plan)
        seconds = self.played.us(plan, self._at) * 1e-6
        self.clock.now += seconds * inner
        return seconds, self.played.executed(plan)

    def now(self) -> float:
        return self.clock.now

    def pause(self, seconds: float) -> None:
        self.clock.now += seconds


class RecordedRunners:
    """Makes runners of the shapes that a recording holds, on one virtual clock."""

    def __init__(self, sweeps: Mapping[Shape, Played], seed: int) -> None:
        self.sweeps, self.seed = sweeps, seed
        self.clock = Clock()
        self._made = 0

    def __call__(self, shape: Shape, seed: int) -> RecordedRunner:
        self._made += 1
        rng = random.Random(f"{self.seed} {seed} {self._made}")
        return RecordedRunner(self.sweeps[shape], self.clock, rng)

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[RecordedRunner]:
        """Other rounds of the same sweep."""
        yield self(shape, seed)

    def now(self) -> float:
        return self.clock.now


class RecordedBackend(StandIn):
    """The kernels of a recording. For the tuner (`strict`) they take what was recorded and no more;
    a policy may also ask for what lies between."""

    def __init__(self, recording: Recording, sweeps: Mapping[Shape, Played], strict: bool) -> None:
        self.name = recording.device.backend
        self._kernel, self._sweeps, self._strict = recording.kernel, sweeps, strict
        self._tiles = {shape.rows: played.tiles for shape, played in sweeps.items()}

    def digest(self) -> str:
        return self._kernel

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        """Those recorded for as many rows."""
        return self._tiles.get(shape.rows, ())

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        if self._strict and not (shape in self._sweeps and self._sweeps[shape].known(plan)):
            return f"{plan} was not recorded at {shape}"
        return None
