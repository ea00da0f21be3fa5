"""Stand-ins for a device, a back end and a stopwatch, with known answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mla_tuner.device import Device
from mla_tuner.measure import Checked
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape


def make_device(cores: int | None = 2, backend: str = "cpu") -> Device:
    """A small CPU, or a device with that many cores."""
    return Device(backend, "x86_64-avx2", "x86_64-avx2", cores, 24, "test", 32 << 20)


@dataclass
class FakeBackend:
    """Native kernels with tiles of 16 and 32 rows; `reason` says why there are none."""

    reason: str = ""
    checked: tuple[bool, str] = (True, "")
    kernel: str = "digest"
    refused: tuple[Plan, ...] = ()
    name: str = "cpu"

    def digest(self) -> str:
        return self.kernel

    def available(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return () if self.reason else ("r16", "r32")

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        if plan.native and (self.reason or plan in self.refused):
            return self.reason or f"{plan} is refused"
        return "no fused attention" if plan.path == "mlx_fused" else None

    def proof(self, plan: Plan, shape: Shape) -> tuple[bool, str]:
        return self.checked

    def compiled(self) -> tuple[tuple[str, float], ...]:
        return ()

    def self_check(self) -> tuple[bool, str]:
        return self.checked

    def run(self, plan: Plan, call: Any) -> Any:
        raise AssertionError("a fake runs nothing")

    def executed(self, ticket: int) -> Plan | None:
        return None

    def detail(self, ticket: int) -> dict[str, object]:
        return {}


@dataclass
class FakeRunner:
    """Plans with known times on a clock of its own; `drift` scales them by the time of day."""

    seconds: Callable[[Plan], float]
    noise: float = 0.0
    drift: Callable[[float], float] = lambda now: 1.0
    check_result: Callable[[Plan], Checked] = lambda plan: Checked(True, 1e-6, "", 1e-4)
    executed: Callable[[Plan], Plan | None] = lambda plan: plan
    seed: int = 0
    clock: float = 0.0
    queued: bool = False
    paused: list[float] = field(default_factory=list)
    calls: list[Plan] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)  # of each sample, its number of calls

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def check(self, plan: Plan) -> Checked:
        checked = self.check_result(plan)
        self.clock += checked.seconds
        return checked

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        self.calls.append(plan)
        self.chains.append(inner)
        factor = self.drift(self.clock) * self.rng.lognormvariate(0.0, self.noise)
        seconds = self.seconds(plan) * factor
        self.clock += seconds * inner if math.isfinite(seconds) else 0.0
        return seconds, self.executed(plan)

    def now(self) -> float:
        return self.clock

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.clock += seconds


@dataclass
class FakeRunners:
    """Runners that share one clock; `seconds(shape, plan)` is the truth."""

    seconds: Callable[[Shape, Plan], float]
    noise: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    last: FakeRunner | None = None
    made: list[Shape] = field(default_factory=list)
    duels: list[Shape] = field(default_factory=list)
    kernels: list[tuple[str, float]] = field(default_factory=list)
    kept: bool = True  # kernels, from one bucket to the next

    def __call__(self, shape: Shape, seed: int) -> FakeRunner:
        self.made.append(shape)
        clock = self.now()
        self.last = FakeRunner(
            lambda plan: self.seconds(shape, plan),
            self.noise,
            seed=len(self.made) + seed * 1000,
            clock=clock,
            **self.options,
        )
        return self.last

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[FakeRunner]:
        self.duels.append(shape)
        yield self(shape, seed)

    def queued(self) -> bool:
        return bool(self.options.get("queued"))

    def compiled(self) -> list[tuple[str, float]]:
        return self.kernels

    def ready(self) -> list[tuple[str, float]]:
        return self.kernels if self.kept else []

    def __enter__(self) -> FakeRunners:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def now(self) -> float:
        return self.last.clock if self.last else 0.0
