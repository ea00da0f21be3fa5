"""What the runs of several machines say about a bucket together. Pure functions.

An entry is the final duel of one run. Their pairs are thrown together, plan by plan; so the answer
depends on the set of entries alone, not on who was merged with whom first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from .candidates import MIN_GAIN
from .evidence import median_interval, paired, plainness
from .plan import NATIVE_PATHS, Plan
from .table import BASELINES


@dataclass(frozen=True)
class Entry:
    """What one run found in a bucket: the plan that met the baseline, and both times of each round.

    `samples_us[i]` and `baseline_samples_us[i]` are microseconds of one call in round i. Without
    samples the plan `failed` ("wrong" or "error") or is the baseline itself, which nothing came
    close to. `best` are the best plans of `single` and `split` with their speed-ups, as far as they
    were measured. `day` is ISO, UTC.
    """

    run: str
    plan: Plan
    failed: str
    max_error: float | None
    samples_us: tuple[float, ...]
    baseline: str
    baseline_samples_us: tuple[float, ...]
    best: tuple[tuple[Plan, float], ...]
    day: str

    @property
    def ratios(self) -> list[float]:
        """time(baseline) / time(plan) of each round: the paired speed-ups."""
        return paired(self.baseline_samples_us, self.samples_us)


class Pooled(NamedTuple):
    """The winner that entries make. Times in microseconds, speed-ups over `baseline`.

    The interval is None where the baseline stays. `rounds` are those that the winner was timed in.
    """

    plan: Plan
    baseline: str
    median_us: float
    baseline_us: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    rounds: int
    single_speedup: float | None
    split_speedup: float | None
    day: str


class _Claim(NamedTuple):
    """A plan that clears the bar."""

    low: float
    speedup: float
    high: float
    plan: Plan
    entries: tuple[Entry, ...]


def pool(entries: Sequence[Entry]) -> Pooled:
    """The winner of a bucket's entries.

    Of the plans that clear `MIN_GAIN` with all their pairs it is the one with the highest lower
    end. One that failed anywhere, or that one machine alone found slower for sure, never wins.

    Raises:
        ValueError: no entry has times of its baseline.
    """
    timed = [each for each in entries if each.baseline_samples_us]
    if not timed:
        raise ValueError("no entry has times of the baseline")
    default = min((each.baseline for each in timed), key=BASELINES.index)
    compared = [each for each in timed if each.baseline == default]
    day = max(each.day for each in entries)
    claims = list(filter(None, (_claim(plan, compared, entries) for plan in _plans(compared))))
    best = min(claims, key=lambda claim: (-claim.low, plainness(claim.plan)), default=None)
    met = best.entries if best else tuple(compared)
    baseline_times = [us for each in met for us in each.baseline_samples_us]
    times = [us for each in met for us in each.samples_us] if best else baseline_times
    known = {path: _best(compared, path) for path in NATIVE_PATHS}
    if best and best.plan.native:
        known[best.plan.path] = best.speedup
    return Pooled(
        plan=best.plan if best else Plan(default),
        baseline=default,
        median_us=median(times),
        baseline_us=median(baseline_times),
        speedup=best.speedup if best else 1.0,
        speedup_low=best.low if best else None,
        speedup_high=best.high if best else None,
        rounds=len(times),
        single_speedup=known["single"],
        split_speedup=known["split"],
        day=day,
    )


def _plans(entries: Iterable[Entry]) -> set[Plan]:
    return {each.plan for each in entries if each.samples_us}


def _claim(plan: Plan, compared: Sequence[Entry], entries: Sequence[Entry]) -> _Claim | None:
    """What speaks for a plan; None where something speaks against it, or it is not enough."""
    if any(each.failed for each in entries if each.plan == plan):
        return None
    timed = tuple(each for each in compared if each.plan == plan and each.samples_us)
    for each in timed:
        alone = median_interval(each.ratios)
        if alone is not None and alone[1] < 1.0:
            return None
    ratios = [ratio for each in timed for ratio in each.ratios]
    interval = median_interval(ratios)
    if interval is None or interval[0] <= MIN_GAIN:
        return None
    return _Claim(interval[0], median(ratios), interval[1], plan, timed)


def _best(entries: Iterable[Entry], path: str) -> float | None:
    """The median over machines of the best that they saw of a path."""
    found = [speedup for each in entries for plan, speedup in each.best if plan.path == path]
    return median(found) if found else None
