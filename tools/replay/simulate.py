"""Runners of a simulated device, on a virtual clock; and a stage on which the real tuner plays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

from mla_tuner import backends, tuner
from mla_tuner.backends import Backend
from mla_tuner.measure import Checked
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

from .noise import Noise, Weather

Seconds = Callable[[Shape, Plan], float]
CHECK_CALLS = 3  # a proof of correctness takes about as long as that many calls, and the reference
CHECK_S = 2e-3


@dataclass
class Clock:
    """Virtual seconds, shared by all runners of one machine."""

    now: float = 0.0


@dataclass
class SimRunner:
    """One process on the machine: plans keep their placement in it, and compile once a tile."""

    shape: Shape
    seconds: Seconds
    weather: Weather
    clock: Clock
    compile_s: float = 0.0
    compiled: set[str] = field(default_factory=set)
    queued: bool = False
    placed: dict[Plan, float] = field(default_factory=dict)

    def check(self, plan: Plan) -> Checked:
        """Always right; the first call of a tile pays its compilation."""
        first = self.seconds(self.shape, plan)
        if plan.native and plan.tile not in self.compiled:
            self.compiled.add(plan.tile)
            first += self.compile_s
        self.clock.now += CHECK_S + (CHECK_CALLS - 1) * self.seconds(self.shape, plan) + first
        return Checked(True, 0.0, "", first)

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        """The truth, as this weather shows it."""
        if plan not in self.placed:
            self.placed[plan] = self.weather.placement()
        factor = self.weather.sample(self.clock.now) * self.placed[plan]
        seconds = self.seconds(self.shape, plan) * factor
        self.clock.now += seconds * inner
        return seconds, plan

    def now(self) -> float:
        return self.clock.now

    def pause(self, seconds: float) -> None:
        self.clock.now += seconds


class SimRunners:
    """One simulated machine, with weather of its own."""

    def __init__(
        self, seconds: Seconds, noise: Noise, *, seed: int = 0, compile_s: float = 0.0
    ) -> None:
        self.seconds, self.compile_s = seconds, compile_s
        self.clock = Clock()
        self.weather = Weather(noise, random.Random(seed))
        self._compiled: set[str] = set()

    def __call__(self, shape: Shape, seed: int) -> SimRunner:
        return self._runner(shape, self._compiled)

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[SimRunner]:
        """A new process: nothing compiled, another placement."""
        yield self._runner(shape, set())

    def _runner(self, shape: Shape, compiled: set[str]) -> SimRunner:
        return SimRunner(shape, self.seconds, self.weather, self.clock, self.compile_s, compiled)

    def now(self) -> float:
        return self.clock.now


@contextmanager
def stage(backend: Backend) -> Iterator[None]:
    """Within it the tuner sees that back end, and no lock: nothing here uses the machine."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(backends, "get", return_value=backend))
        patches.enter_context(mock.patch.object(tuner, "machine_lock", nullcontext))
        yield
