"""The plans of a bucket beside each other: the best of each path, regret, and what was refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ..evidence import Measurement, percentile
from ..plan import PATHS, Plan
from ..shapes import Bucket
from .findings import Finding


@dataclass(frozen=True)
class Point:
    """The best plan of a path on a bucket: its time of one call in microseconds, with the range of
    80 % of the samples (None: not known), and its speed-up over the baseline.
    """

    path: str
    plan: str
    median_us: float
    p10_us: float | None = None
    p90_us: float | None = None
    speedup: float | None = None
    rounds: int = 0


@dataclass(frozen=True)
class Regret:
    """How much slower one way to choose is than the best measured plan, over some buckets."""

    name: str
    buckets: int
    mean: float
    median: float
    p95: float
    worst: float


@dataclass(frozen=True)
class Refused:
    """Candidates that were measured and can't be taken, and why; `plans` and `buckets` of the same
    status and message.
    """

    status: str
    message: str
    plans: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)


def founded(measured: Iterable[Measurement]) -> dict[Plan, Measurement]:
    """Of each plan that was timed, the measurement of most rounds; the last one of equals."""
    found: dict[Plan, Measurement] = {}
    for each in measured:
        timed = each.status == "ok" and each.median_us and each.ratio
        if timed and (each.plan not in found or each.rounds >= found[each.plan].rounds):
            found[each.plan] = each
    return found


def points(finding: Finding) -> list[Point]:
    """The best plan of each path, in the order of `PATHS`."""
    made: dict[str, Point] = {}
    for m in founded(measurement for _, measurement in finding.measured).values():
        point = _point(m)
        if point.path not in made or point.median_us < made[point.path].median_us:
            made[point.path] = point
    return [made[path] for path in PATHS if path in made]


def _point(m: Measurement) -> Point:
    median_us = m.median_us or 0.0  # `founded` leaves none without a time
    return Point(m.plan.path, str(m.plan), median_us, m.p10_us, m.p90_us, m.ratio, m.rounds)


# --- regret --------------------------------------------------------------------------------------


def searched(finding: Finding) -> dict[Plan, Measurement]:
    """What can be compared: the duel had a process of its own, and a luck of its own."""
    return founded(m for stage, m in finding.measured if stage == "search")


def best(finding: Finding) -> Point | None:
    """Of the plans that were timed in the most rounds: what looks good in two rounds is luck.

    By time, not by speed-up: `mlx` is timed in the fewest rounds, and its noise would count twice.
    """
    found = searched(finding)
    most = max((m.rounds for m in found.values()), default=0)
    known = [_point(m) for m in found.values() if m.rounds == most]
    return min(known, key=lambda point: point.median_us, default=None)


def behind(time_us: float | None, best: Point | None) -> float | None:
    """How much slower than the best, 0.05 for 5 %. Below 0: luck of few rounds."""
    return time_us / best.median_us - 1 if time_us and best else None


def regret(finding: Finding) -> float | None:
    """Of the stored plan; None where it can't be compared."""
    return _regret(finding, [finding.row.plan] if finding.row else [])


def _regret(finding: Finding, plans: Sequence[Plan]) -> float | None:
    """Of the best of these plans."""
    known = searched(finding)
    times = [known[plan].median_us or 0.0 for plan in plans if plan in known]
    found = behind(min(times, default=None), best(finding))
    return None if found is None else max(0.0, found)


def regrets(findings: Sequence[Finding]) -> list[Regret]:
    """Of the stored plans, and of staying with one path, with its best plan for each bucket."""
    choices = {"the stored plans": [regret(each) for each in findings]}
    for path in PATHS:
        plans = [[plan for plan in searched(each) if plan.path == path] for each in findings]
        choices[f"always {path}"] = list(map(_regret, findings, plans))
    named = {name: [v for v in values if v is not None] for name, values in choices.items()}
    return [
        Regret(name, len(v), fmean(v), median(v), percentile(v, 0.95), max(v))
        for name, v in named.items()
        if v
    ]


# --- refused -------------------------------------------------------------------------------------


def refused(findings: Sequence[Finding]) -> list[Refused]:
    """Failures, most frequent first; then the finalists that were not faster for sure."""
    groups: dict[tuple[str, str], Refused] = {}
    for finding in findings:
        for status, plan, message in _refusals(finding):
            group = groups.setdefault((status, message), Refused(status, message))
            group.plans.append(plan)
            group.buckets.append(finding.bucket)
    order = sorted(groups.values(), key=lambda each: -len(each.plans))
    return sorted(order, key=lambda each: each.status == NOT_FASTER)


NOT_FASTER = "not faster"


def _refusals(finding: Finding) -> Iterator[tuple[str, str, str]]:
    for _, m in finding.measured:
        if m.status != "ok":
            yield m.status, str(m.plan), m.message
    row = finding.row
    duels = [m for stage, m in finding.measured if stage in ("duel", "refute")]
    if row and row.stays and duels and duels[-1].status == "ok" and duels[-1].plan != row.plan:
        yield NOT_FASTER, str(duels[-1].plan), finding.reason
