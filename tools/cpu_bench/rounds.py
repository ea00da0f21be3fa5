"""Forms of the same work, timed in shuffled rounds with the machine's peak probed in each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.peaks import peaks

# Work before a form that follows a pause: else two threads had one core between them for 5 to 20 ms
# (2 virtual cores of a Xeon of the Skylake kind, 2026-11-30).
WAKE_MS = 20
FREE_RATIO = 1.7  # two threads must reach this many times one thread's peak, or a core was taken
FREE_SHARE = 0.85  # and one thread this share of the best seen
MIN_ROUNDS = 5
HOPELESS = {"own": 1.25, "peer": 1.5}  # a form that far behind the best of its kind leaves early
TRIAL_ROUNDS = 3
PROBE_MS = 4.0  # longer than a scheduler's slice, so that another job shows
SAMPLE_S = 0.004  # a sample repeats short work for that long and keeps the best


@dataclass(frozen=True)
class Form:
    """One way to do the work. `sample()` gives seconds of one call; kind is own, peer or probe."""

    name: str
    kind: str
    sample: Callable[[], float]


def timed(run: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """A sample of `run`: the best of a few repeats, so that each finds the cache it left itself."""

    def sample() -> float:
        best, spent, repeats = float("inf"), 0.0, 0
        while spent < SAMPLE_S or (repeats < 2 and spent < 0.05):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            took = time.perf_counter() - start
            best, spent, repeats = min(best, took), spent + took, repeats + 1
        return best / calls

    return sample


@dataclass(frozen=True)
class Probe:
    """Multiply-add GFLOP/s of this moment: the samples of one thread, and of all threads."""

    single: tuple[float, ...]
    every: tuple[float, ...]

    def free(self, best_single: float) -> bool:
        """Whether every thread had a core of its own in every sample."""
        alone = min(self.single) >= FREE_SHARE * best_single
        if self.every == self.single:  # one thread only
            return alone
        return alone and min(self.every) >= FREE_RATIO * max(self.single)


@dataclass
class Rounds:
    """Seconds by form, one entry a round, and the probes before each round and after the last.

    A round beside a probe that found a core taken counts only where too few others are left.
    """

    threads: int
    seconds: dict[str, list[float]] = field(default_factory=dict)  # NaN where a form was left out
    kinds: dict[str, str] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.probes) - 1

    @property
    def free(self) -> list[int]:
        """Rounds in which the cores were ours alone."""
        best = max(max(probe.single) for probe in self.probes)
        good = [probe.free(best) for probe in self.probes]
        return [i for i in range(self.count) if good[i] and good[i + 1]]

    @property
    def taken(self) -> bool:
        """True where figures must not be judged: another job had a core nearly all the time."""
        return len(self.free) < TRIAL_ROUNDS

    def samples(self, name: str) -> dict[int, float]:
        """Round and seconds of the rounds that count and have this form."""
        rounds = range(self.count) if self.taken else self.free
        column = self.seconds[name]
        return {i: column[i] for i in rounds if column[i] == column[i]}

    def min(self, name: str) -> float:
        return min(self.samples(name).values(), default=min(_present(self.seconds[name])))

    def median(self, name: str) -> float:
        values = list(self.samples(name).values()) or _present(self.seconds[name])
        return statistics.median(values)

    def best(self, kind: str) -> str:
        """The form of a kind with the lowest minimum."""
        return min((n for n, k in self.kinds.items() if k == kind), key=self.min)

    def ratio(self, slow: str, fast: str) -> float:
        """Median over the rounds of seconds(slow) / seconds(fast)."""
        above, below = self.samples(slow), self.samples(fast)
        paired = [above[i] / below[i] for i in above if i in below]
        return statistics.median(paired) if paired else self.min(slow) / self.min(fast)

    def peak(self) -> float:
        """Highest multiply-add GFLOP/s of all threads in these rounds."""
        return max(max(probe.every) for probe in self.probes)


def _present(column: Sequence[float]) -> list[float]:
    return [value for value in column if value == value]


def interleave(
    forms: Sequence[Form], *, threads: int, seconds: float, rest_s: float = 0.0
) -> Rounds:
    """Time all forms for about `seconds`, up to three times that while a core is taken.

    rest_s: pause after each form, for thread pools that spin on after their work.
    """
    rounds = Rounds(threads, {f.name: [] for f in forms}, {f.name: f.kind for f in forms})
    left, start = list(forms), time.perf_counter()
    rounds.probes.append(_probe(threads))
    while not _enough(rounds, time.perf_counter() - start, seconds):
        for form in random.sample(left, len(left)):
            rounds.seconds[form.name].append(form.sample())
            _rest(threads, rest_s)
        for form in forms:
            if form not in left:
                rounds.seconds[form.name].append(float("nan"))
        rounds.probes.append(_probe(threads))
        if len(rounds.free) >= TRIAL_ROUNDS:  # what a busy core did to a form tells nothing
            left = [f for f in left if _promising(rounds, f)]
    return rounds


def _rest(threads: int, seconds: float) -> None:
    """A pause, after which the cores work for a while: one that has slept may be back late."""
    if seconds:
        time.sleep(seconds)
        peaks.fma_gflops(threads, ms=WAKE_MS)


def _enough(rounds: Rounds, spent: float, seconds: float) -> bool:
    if rounds.count < MIN_ROUNDS or spent < seconds:
        return False
    return len(rounds.free) >= MIN_ROUNDS or spent >= 3 * seconds


def _probe(threads: int) -> Probe:
    one = tuple(peaks.fma_gflops(1, ms=PROBE_MS) for _ in range(2))
    if threads == 1:
        return Probe(one, one)
    return Probe(one, tuple(peaks.fma_gflops(threads, ms=PROBE_MS) for _ in range(2)))


def _promising(rounds: Rounds, form: Form) -> bool:
    limit = HOPELESS.get(form.kind)
    if limit is None:
        return True
    rivals = (n for n, kind in rounds.kinds.items() if kind == form.kind)
    return rounds.min(form.name) <= limit * min(map(rounds.min, rivals))
