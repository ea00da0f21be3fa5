"""How often the tuner is wrong: equal plans promoted, gains missed, winners that flip, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import CONTEXT_GRID, DTYPES, Bucket, Shape
from mla_tuner.tuner import default_buckets

from . import devices
from .devices import Hardware, SimBackend
from .lab import Score, Tuned, percent, tuned
from .noise import DRIFTING, NOISY, QUIET, THERMAL, Noise
from .simulate import Seconds, SimRunners

FALSE_SHARE, FOUND_SHARE, FLIP_SHARE = 0.01, 0.90, 0.05  # the targets
GAIN = 1.05  # a gain that must be found
SAME = 1.02  # winners closer than this in truth are a tie, whichever is stored
CALL_S = 300e-6  # of every plan, where all are equal
WEATHERS = {"quiet": QUIET, "noisy 4 %": NOISY, "drifting 20 %": DRIFTING, "thermal 20 %": THERMAL}


def equal(name: str, noise: Noise, runs: int, seed: int = 1) -> Score:
    """Every plan takes the same time: whatever replaces `mlx` is a false promotion."""
    got = _crowd(lambda shape, plan: CALL_S, noise, runs, seed)
    wrong = sum(row.plan != MLX for row in got.rows.values())
    return Score(
        f"equal candidates promoted, {name}",
        percent(wrong, len(got.rows)),
        f"<= {FALSE_SHARE:.0%}",
        wrong <= FALSE_SHARE * runs and len(got.rows) == runs,
    )


def gains(name: str, noise: Noise, runs: int, seed: int = 2) -> Score:
    """One plan, another in each bucket, is 5 % faster than all others: it must be stored."""

    def seconds(shape: Shape, plan: Plan) -> float:
        return CALL_S / GAIN if plan == _special(shape) else CALL_S

    got = _crowd(seconds, noise, runs, seed)
    found = sum(row.plan == _special(row.bucket.shape) for row in got.rows.values())
    return Score(
        f"gains of 5 % found, {name}",
        percent(found, runs),
        f">= {FOUND_SHARE:.0%}",
        found >= FOUND_SHARE * runs,
    )


def _special(shape: Shape) -> Plan:
    """Which plan wins here: `single` or `split` with 2 to 8 partitions, by heads."""
    partitions = 1 + shape.heads % 8
    return Plan("split" if partitions > 1 else "single", partitions, "r16")


def _crowd(seconds: Seconds, noise: Noise, runs: int, seed: int) -> Tuned:
    """As many buckets as runs, of one task a sequence, so that all have the same candidates."""
    contexts = [context for context in CONTEXT_GRID if context >= 4096]
    buckets = default_buckets(contexts, [1], range(1, 17), DTYPES, q_lens=[1])
    buckets += default_buckets(contexts, [1], range(1, 17), DTYPES, layouts=["dense"])
    hardware = devices.cpu()
    runners = SimRunners(seconds, noise, seed=seed)
    return tuned(hardware.device, SimBackend(hardware), runners, buckets[:runs], seed=seed)


# --- flips -------------------------------------------------------------------------------------


def flips(hardware: Hardware, name: str, noise: Noise, buckets: Sequence[Bucket]) -> Score:
    """Two runs on one machine, the second on another day.

    A bucket flips where one winner is `mlx` and the other is not, or where the two are more than
    2 % apart in truth. Other differences are ties: the rule takes the fewest partitions of those
    that it can't tell apart, and nobody notices which.
    """
    first, second = (
        tuned(
            hardware.device,
            SimBackend(hardware),
            SimRunners(hardware.seconds, noise, seed=seed, compile_s=hardware.compile_s),
            buckets,
            seed=seed,
        ).rows
        for seed in (11, 12)
    )
    both = [bucket for bucket in buckets if bucket in first and bucket in second]
    flipped = ties = 0
    for bucket in both:
        plans = first[bucket].plan, second[bucket].plan
        times = [hardware.seconds(bucket.shape, plan) for plan in plans]
        differ = plans[0].native != plans[1].native or max(times) > SAME * min(times)
        flipped += differ
        ties += plans[0] != plans[1] and not differ
    what = f"winners that flip, {hardware.device.name}, {name}"
    told = f"{percent(flipped, len(both))}, {ties} more are ties"
    met = flipped <= FLIP_SHARE * len(buckets) and len(both) == len(buckets)
    return Score(what, told, f"<= {FLIP_SHARE:.0%}", met)


def flip_buckets(contexts: Sequence[int]) -> list[Bucket]:
    """What a run without options tunes, up to longer contexts."""
    return default_buckets(contexts, [1, 2, 4, 8], [16, 128], ["bfloat16"])


# --- budgets -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Costly:
    """Keeps the cost of the most expensive single act: the tuner may overrun by one of those."""

    hardware: Hardware
    worst: list[float]

    def seconds(self, shape: Shape, plan: Plan) -> float:
        """The truth, remembered."""
        seconds = self.hardware.seconds(shape, plan)
        self.worst[0] = max(self.worst[0], seconds)
        return seconds


def budgets(hardware: Hardware, budgets_s: Sequence[float]) -> Score:
    """Runs with budgets that end them early, on a throttling machine."""
    shares, over = [], 0
    for seed, budget_s in enumerate(budgets_s):
        costly = _Costly(hardware, [0.0])
        runners = SimRunners(costly.seconds, THERMAL, seed=seed, compile_s=hardware.compile_s)
        got = tuned(
            hardware.device,
            SimBackend(hardware),
            runners,
            flip_buckets([1 << k for k in range(10, 18)]),
            budget_s=budget_s,
            seed=seed,
        )
        shares.append(got.spent_s / budget_s)
        # A check costs a few calls and a compilation; the machine may be in its slow state.
        one = 4 * (1 + THERMAL.steps) * costly.worst[0] + hardware.compile_s + 1.0
        over += got.spent_s > budget_s + one
    spent = f"{min(shares):.0%} to {max(shares):.0%} spent"
    return Score(
        f"budgets overrun by more than one candidate, {hardware.device.name}",
        f"{over} of {len(shares)}; {spent}",
        "0",
        over == 0,
    )
