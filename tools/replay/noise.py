"""What disturbs a stopwatch: jitter, tails, drift, thermal steps, throttling, neighbours."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Noise:
    """How restless a machine is. Every amplitude is a share: 0.2 makes a call up to 20 % slower.

    jitter: sigma of the lognormal factor of every sample. tails: chance that a sample is hit by
    something, which costs an exponential share with mean `tail_size`. drift: a clock that swings
    between full speed and 1 + drift within `drift_s`. steps: sudden changes between full speed and
    1 + steps, `steps_s` apart on average. throttle: after `throttle_s` of work the clock ramps down
    by that much; it stays there. neighbour: another job that comes and goes, `neighbour_s` apart
    on average. placement: sigma of the factor that a plan keeps in one process, and loses in the
    next.
    """

    jitter: float = 0.01
    tails: float = 0.0
    tail_size: float = 0.5
    drift: float = 0.0
    drift_s: float = 8.0
    steps: float = 0.0
    steps_s: float = 2.0
    throttle: float = 0.0
    throttle_s: float = 5.0
    neighbour: float = 0.0
    neighbour_s: float = 1.0
    placement: float = 0.0


QUIET = Noise()
NOISY = Noise(jitter=0.04)
DRIFTING = Noise(drift=0.2)
THERMAL = Noise(steps=0.2)
THROTTLED = Noise(throttle=0.3)
BUSY = Noise(jitter=0.02, tails=0.05, neighbour=0.15, placement=0.003)
WEATHERS = {
    "quiet 1 %": QUIET,
    "noisy 4 %": NOISY,
    "drifting 20 %": DRIFTING,
    "thermal steps 20 %": THERMAL,
    "throttling 30 %": THROTTLED,
    "neighbours, tails": BUSY,
}


@dataclass
class Weather:
    """The state of one machine over time; asked at times that never go back."""

    noise: Noise
    rng: random.Random
    _phase: float = field(init=False)
    _step: bool = False
    _step_until: float = field(init=False)
    _busy: bool = False
    _busy_until: float = field(init=False)

    def __post_init__(self) -> None:
        self._phase = self.rng.random()
        self._step_until = self.rng.expovariate(1 / self.noise.steps_s)
        self._busy_until = self.rng.expovariate(1 / self.noise.neighbour_s)

    def level(self, now: float) -> float:
        """The factor on every time at this moment: 1 at full speed."""
        noise = self.noise
        level = 1.0
        if noise.drift:
            swing = math.sin(2 * math.pi * (now / noise.drift_s + self._phase))
            level *= 1 + noise.drift * (0.5 + 0.5 * swing)
        if noise.steps:
            while now >= self._step_until:
                self._step = not self._step
                self._step_until += self.rng.expovariate(1 / noise.steps_s)
            level *= 1 + noise.steps * self._step
        if noise.throttle:
            level *= 1 + noise.throttle * min(1.0, max(0.0, now / noise.throttle_s - 1))
        if noise.neighbour:
            while now >= self._busy_until:
                self._busy = not self._busy
                self._busy_until += self.rng.expovariate(1 / noise.neighbour_s)
            level *= 1 + noise.neighbour * self._busy
        return level

    def sample(self, now: float) -> float:
        """The factor on one sample that starts now."""
        noise = self.noise
        factor = self.level(now) * self.rng.lognormvariate(0.0, noise.jitter)
        if noise.tails and self.rng.random() < noise.tails:
            factor *= 1 + self.rng.expovariate(1 / noise.tail_size)
        return factor

    def placement(self) -> float:
        """The factor that one plan keeps in one process."""
        return self.rng.lognormvariate(0.0, self.noise.placement)
