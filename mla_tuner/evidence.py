"""Measurements, and what follows from them: intervals, losers, ties, the verdict. Pure functions.

Samples of one call of `measure` pair by index: `samples_us[i]` of two plans come from the same
round, whatever the clock did in the meantime. Only times of the same rounds are ever compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from math import erfc, log, sqrt
from statistics import median

from .candidates import MIN_GAIN
from .plan import MLX, MLX_PLANS, PATHS, Plan
from .shapes import Shape

STATUSES = ("ok", "wrong", "error", "timeout")
FAILED = ("wrong", "error")
LATE = "the host was never ahead of the GPU"  # begins the message of a `timeout` of that cause
TIE = 1.02  # closer than this, nobody notices: fewer partitions win
EQUAL = 1.005  # closer than this, the order is fixed
OVERLAP_TIE = 1.05  # an interval that reaches 1 makes a tie too, but not at any price
MUCH_FEWER = 0.75  # two partitions in forty save no memory: a tie is not worth being slower for
MIN_ROUNDS = 6  # fewer pairs have no 95 % interval: all of them on one side is 3 % luck at six
CONFIDENCE = 0.95
LOSER_P = 0.02  # six rounds lost out of six
FAR_BEHIND = 1.5  # so much slower in every round: two rounds are enough


@dataclass(frozen=True)
class Measurement:
    """What one plan did on one shape. Times are of one call, in microseconds.

    `ratio` is time(baseline) / time(plan), the speed-up, paired within rounds; its interval needs
    six pairs and is None with fewer. `samples_us[i]` belongs to round i. `executed` is the plan
    that really ran. Anything but `ok` has a one-line message and no times. `inner` calls were
    chained in each sample. `dropped` rounds of the race were dropped because the baseline drifted,
    and `paused_s` seconds waited for that to pass.
    """

    shape: Shape
    plan: Plan
    status: str = "ok"
    message: str = ""
    max_error: float | None = None
    rounds: int = 0
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    samples_us: tuple[float, ...] = field(default=(), repr=False)
    executed: Plan | None = None
    dropped: int = 0
    paused_s: float = 0.0
    inner: int = 1

    @property
    def late(self) -> bool:
        """Whether it runs, but could not be timed: nothing follows from that about the plan."""
        return self.status == "timeout" and self.message.startswith(LATE)


def baseline(measured: Sequence[Measurement]) -> Measurement | None:
    """What the others are compared with: `mlx` or, where that failed, the next of MLX's paths that
    did not. `mlx` itself where all of them failed; None where none was measured.
    """
    found = {m.plan: m for m in reversed(measured) if m.plan in MLX_PLANS}  # the first of each
    paths = [found[plan] for plan in MLX_PLANS if plan in found]
    return next((m for m in paths if m.status not in FAILED), paths[0] if paths else None)


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Interval that holds the true median, by order statistics: no distribution is assumed.

    The count of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th
    largest value enclose it with probability 1 - 2 P(count < k). The narrowest pair that keeps the
    confidence is taken. None below six values: even their full range holds it less than 95 % of
    the time.
    """
    n = len(values)
    outside, k, ways, all_ways = 0.0, 0, 1, 1 << n  # of whole numbers: no float holds 2.0**1024
    while True:  # k-th smallest and largest stay inside while the tails beyond them are light
        tail = outside + ways / all_ways
        if 2 * tail > 1 - confidence:
            break
        outside, ways, k = tail, ways * (n - k) // (k + 1), k + 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share (0..1) of the values lies, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def slower_p(log_ratios: Sequence[float]) -> float:
    """One-sided p of the signed-rank test that the logs of paired ratios lie above 0.

    Exact up to 25 pairs (the counts of rank subsets), normal approximation above. Zeros count as
    ties and are left out.
    """
    values = sorted((x for x in log_ratios if x != 0.0), key=abs)
    n = len(values)
    if n == 0:
        return 1.0
    positive = sum(rank for rank, value in enumerate(values, 1) if value > 0)
    if n > 25:
        spread = sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return 0.5 * erfc((positive - n * (n + 1) / 4) / spread / sqrt(2))
    return _rank_sum_tail(n)[positive]


@cache
def _rank_sum_tail(n: int) -> tuple[float, ...]:
    """P(rank sum of n fair signs >= s) for every s."""
    counts = [1] + [0] * (n * (n + 1) // 2)  # counts[s]: rank subsets that sum to s
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(total / 2.0**n for total in reversed(list(accumulate(reversed(counts)))))


def paired(plan: Sequence[float], other: Sequence[float]) -> list[float]:
    """time(plan) / time(other) of the rounds that both were timed in."""
    return [a / b for a, b in zip(plan, other, strict=False)]


def lost(ratios: Sequence[float]) -> bool:
    """Whether a plan with these paired times over the leader's can't even tie with it any more.

    Who is behind by less than a tie stays in the race however surely: with fewer partitions it may
    still be the one to take.
    """
    return slower_p([log(ratio / TIE) for ratio in ratios]) < LOSER_P


def tied(measurement: Measurement, leader: Measurement) -> bool:
    """Whether a plan is as good as the leader for all that anybody can tell."""
    ratios = paired(measurement.samples_us, leader.samples_us)
    behind = median(ratios)
    if behind <= TIE:
        return True
    interval = median_interval(ratios)
    return behind <= OVERLAP_TIE and interval is not None and interval[0] <= 1.0


def finalist(measurements: Sequence[Measurement], default: Plan = MLX) -> Measurement | None:
    """The plan that should meet the baseline in the final duel; None where none can win it.

    The leader has the lowest median of those timed in every round. Of the plans tied with it those
    with the fewest partitions are left, if these are `MUCH_FEWER`; else those with the leader's
    count. Of these it is the fastest or, where it is `EQUAL`, the plainest: the same one whatever
    the order in which they were proposed and timed. (Wider ties pay for fewer partitions, not for
    another tile: by `TIE` a tenth of all buckets changed theirs in 4 % of noise, by `EQUAL` a
    sixtieth. Simulated CPU, 2026-11-29.)
    """
    timed = [m for m in measurements if m.status == "ok" and m.plan != default]
    if not timed:
        return None
    longest = max(len(m.samples_us) for m in timed)
    full = [m for m in timed if len(m.samples_us) == longest]  # the others left as losers
    leader = min(full, key=lambda m: (median(m.samples_us), plainness(m.plan)))
    if leader.ratio is not None and leader.ratio * FAR_BEHIND < 1:
        return None
    if leader.ratio_high is not None and leader.ratio_high < MIN_GAIN:
        return None
    rivals = [m for m in full if tied(m, leader)]
    fewest, usual = min(m.plan.partitions for m in rivals), leader.plan.partitions
    count = fewest if fewest <= MUCH_FEWER * usual else usual
    rivals = [m for m in rivals if m.plan.partitions == count]
    fastest = min(median(m.samples_us) for m in rivals)
    close = [m for m in rivals if median(m.samples_us) <= EQUAL * fastest]
    return min(close, key=lambda m: plainness(m.plan))


def plainness(plan: Plan) -> tuple[int, int, int, str]:
    """Order among plans that are as good as each other, the one to take first.

    Fewer partitions, then the path that `PATHS` names first, then the smaller tile (`r8`, `r16`).
    """
    return plan.partitions, PATHS.index(plan.path), len(plan.tile), plan.tile


def verdict(
    duel: Sequence[Measurement], search: Sequence[Measurement] = ()
) -> tuple[Measurement, Measurement, str] | None:
    """The winner of a final duel, the baseline there, and the sentence that says why.

    Only an interval whose lower end clears `MIN_GAIN` replaces the baseline; the rival comes last.
    search: tells why the baseline is not `mlx`. None where the duel decides nothing: the baseline
    has no time, or the budget left too few rounds.
    """
    default = baseline(duel)
    if default is None or default.status != "ok":
        return None
    rival = next((m for m in reversed(duel) if m is not default), None)
    decided = _judged(default, rival)
    return decided and (decided[0], default, decided[1] + _instead([*search, *duel], default.plan))


def _judged(default: Measurement, rival: Measurement | None) -> tuple[Measurement, str] | None:
    if rival is None:
        return default, f"no other plan came close to {default.plan}"
    if rival.status == "timeout":
        return None
    if rival.status != "ok":
        return default, f"{rival.plan} failed in the final duel: {rival.message}"
    if rival.ratio is None or rival.ratio_low is None or rival.ratio_high is None:
        return None
    span = f"{rival.ratio:.3g}x {default.plan} [{rival.ratio_low:.3g}, {rival.ratio_high:.3g}]"
    if rival.ratio_low > MIN_GAIN:
        return rival, f"{rival.plan} is {span}"
    return default, f"{rival.plan} is {span}: not beyond {MIN_GAIN}x for sure"


def refuted(duel: Sequence[Measurement]) -> tuple[Measurement, Measurement, str]:
    """What a duel leaves that showed a stored plan, its last, to be wrong or slower: as `verdict`,
    with the baseline as the winner.
    """
    *others, rival = duel
    default = baseline(others) or Measurement(rival.shape, MLX)
    ratio = "" if rival.ratio is None else f"{rival.ratio:.3g}x {default.plan}"
    reason = f"{rival.plan} did not hold: {rival.message or ratio}"
    return default, default, reason + _instead(others, default.plan)


def _instead(measured: Sequence[Measurement], default: Plan) -> str:
    """Why plans are not compared with `mlx`; "" where they are."""
    failed = [m.message for m in measured if m.plan == MLX and m.status in FAILED]
    if default == MLX or not failed:
        return ""
    return f"; mlx itself can't run here: {failed[-1]}; compared with {default}"


def best_speedup(measured: Sequence[Measurement], path: str) -> float | None:
    """Of the best plan of a path; of one measured more than once, the last time counts."""
    last = {m.plan: m.ratio for m in measured if m.plan.path == path and m.status == "ok"}
    return max((ratio for ratio in last.values() if ratio is not None), default=None)
