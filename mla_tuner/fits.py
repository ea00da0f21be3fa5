"""What one device's winners say about the contexts between them: thresholds, the law, the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, exp, floor, inf, log
from typing import NamedTuple

from .candidates import (
    ASSUMED_CORES,
    MIN_GAIN,
    NEARLY_AS_FULL,
    busy,
    fill,
    law,
    row_groups,
)
from .plan import MLX, NATIVE_PATHS, PATHS, Plan
from .shapes import MAX_PARTITIONS, Bucket, pieces

_BISECTIONS = 40  # a context of a million tokens needs 20 to be exact


class Speedups(NamedTuple):
    """Speed-up over the baseline of the best `single` and `split` plan of a bucket; None: not
    measured.
    """

    single: float | None = None
    split: float | None = None


class Tuned(NamedTuple):
    """A tuned bucket: its winner, what was measured of both native paths, and the path of MLX's
    that this is over.
    """

    bucket: Bucket
    plan: Plan
    speedups: Speedups = Speedups()
    baseline: str = MLX.path


@dataclass(frozen=True)
class Threshold:
    """Contexts from which our kernel wins, and from which splitting wins, up to the longest tuned.

    Interpolated between the tuned contexts that lie on both sides, where speed-ups are known there;
    else the first tuned one that won. None: not even on the longest tuned context. `kappa` is the
    constant of `law`; None without a split winner.
    """

    native_from: int | None
    split_from: int | None
    kappa: float | None


def threshold(
    winners: Mapping[Bucket, Plan],
    cores: int | None,
    speedups: Mapping[Bucket, Speedups | tuple[float | None, float | None]] | None = None,
) -> Threshold:
    """The threshold of winners that differ only in context. Never beyond what was tuned."""
    known = speedups or {}
    return threshold_of(
        [Tuned(b, winners[b], Speedups(*known.get(b, ()))) for b in sorted(winners)], cores
    )


def threshold_of(tuned: list[Tuned], cores: int | None) -> Threshold:
    """The same of tuned buckets with ascending contexts."""
    native_from, split_from = _start(tuned, NATIVE_PATHS), _start(tuned, ("split",))
    return Threshold(native_from, split_from, constant(tuned, cores))


def constant(tuned: list[Tuned], cores: int | None) -> float | None:
    """The law's constant that split winners show, their geometric mean; None without any."""
    logs = [
        log(each.plan.partitions / law(1.0, each.bucket, each.plan.tile, cores or ASSUMED_CORES))
        for each in tuned
        if each.plan.path == "split"
    ]
    return exp(sum(logs) / len(logs)) if logs else None


def _start(tuned: list[Tuned], paths: Collection[str]) -> int | None:
    """From where these paths win on every longer context."""
    start = None
    for index in reversed(range(len(tuned))):
        if tuned[index].plan.path in paths:
            start = tuned[index].bucket.context
        else:
            return crossing(tuned[index], tuned[index + 1], paths) if start else None
    return start


def crossing(lower: Tuned, upper: Tuned, paths: Collection[str]) -> int:
    """The context from which these paths win, between a tuned one without and one with them."""
    low, high = lower.bucket.context, upper.bucket.context
    outside, inside = 0.0, 1.0
    for _ in range(_BISECTIONS):
        share = (outside + inside) / 2
        if path_between(share, lower, upper) in paths:
            inside = share
        else:
            outside = share
    return min(high, ceil(exp(log(low) * (1 - inside) + log(high) * inside)))


def path_between(share: float, lower: Tuned, upper: Tuned) -> str:
    """The path at a share (0..1 of the log) of the way between two tuned contexts.

    One that both ends agree on; else the fastest by the interpolated speed-ups, where it clears
    `MIN_GAIN` over what it replaces; else the baseline, also where a speed-up is needed and
    missing: of two that of the end where `mlx` can't run, for it may not run here either.
    """
    default = max(lower.baseline, upper.baseline, key=PATHS.index)
    ends = {lower.plan.path, upper.plan.path}
    if len(ends) == 1:
        return lower.plan.path
    native = ends.intersection(NATIVE_PATHS)
    found = speedups_between(share, lower, upper)
    at = {path: value for path, value in found._asdict().items() if path in native}
    if None in at.values():
        return default
    if "split" in at and at["split"] > MIN_GAIN * max(1.0, at.get("single", 1.0)):
        return "split"
    return "single" if at.get("single", 0.0) > MIN_GAIN else default


def speedups_between(share: float, lower: Tuned, upper: Tuned) -> Speedups:
    """Both speed-ups, log-linear in log context; None where an end doesn't know."""
    pairs = zip(_agreed(lower), _agreed(upper), strict=True)
    return Speedups(*(_blend(share, a, b) for a, b in pairs))


def _blend(share: float, low: float | None, high: float | None) -> float | None:
    if not low or not high:  # 0 has no logarithm, and means nothing either
        return None
    return exp(log(low) * (1 - share) + log(high) * share)


def _agreed(tuned: Tuned) -> Speedups:
    """Speed-ups that don't contradict the winner: a bucket that kept MLX's path has no gain to
    show, whatever its search found, and none that kept a path prefers the other one.
    """
    single, split = tuned.speedups
    if not tuned.plan.native:
        return Speedups(single and min(single, 1.0), split and min(split, 1.0))
    if single and split:
        least = min(single, split)
        return Speedups(single, least) if tuned.plan.path == "single" else Speedups(least, split)
    return tuned.speedups


def share_of(context: int, lower: Tuned, upper: Tuned) -> float:
    """Where a context lies between two tuned ones: 0 to 1 of the log."""
    low, high = lower.bucket.context, upper.bucket.context
    return log(context / low) / log(high / low)


def between(bucket: Bucket, lower: Tuned, upper: Tuned, cores: int | None) -> Plan:
    """The plan of a bucket between two tuned ones. The tile is that of the end with that path, the
    nearer one by ratio where both have it, unless its pieces would waste more of a wave.
    """
    share = share_of(bucket.context, lower, upper)
    path = path_between(share, lower, upper)
    nearest = (lower, upper) if share < 0.5 else (upper, lower)
    tiles = [end.plan.tile for end in nearest if end.plan.path == path]
    if path != "split":
        return Plan(path, 1, tiles[0] if tiles else "")
    counts = {tile: _partitions(bucket, tile, lower, upper, cores) for tile in tiles}
    shares = {tile: _share(bucket, tile, counts[tile], cores, 0.0) for tile in tiles}
    least = NEARLY_AS_FULL * max(shares.values())
    tile = next(tile for tile in tiles if shares[tile] >= least)
    return Plan("split", counts[tile], tile)


def for_batch(
    plan: Plan, bucket: Bucket, batch: int, cores: int | None, speedups: Speedups
) -> Plan:
    """A bucket's plan for the exact batch that was rounded to the bucket's.

    As many tasks as were tuned, within as many waves; cut finer where that leaves much less of a
    wave idle. A plan that is cut into one piece becomes `single`, one of more becomes `split`, but
    only where that path was measured to be faster than `mlx` at the bucket's batch.
    """
    if plan.path not in ("single", "split") or batch == bucket.batch or not cores:
        return plan
    groups = row_groups(bucket.heads * bucket.q_len, plan.tile)

    def waves(count: int) -> int:
        return -(-groups * batch * count // cores)

    tuned_waves = -(-groups * bucket.batch * plan.partitions // cores)
    as_many = -(-plan.partitions * bucket.batch // batch)
    least = max(1, min(tuned_waves * cores // (groups * batch), as_many))
    scan = waves(least) / least  # waves x piece
    finer = range(least + 1, 2 * least + 2)
    better = (n for n in finer if waves(n) / n <= NEARLY_AS_FULL * scan)
    count = pieces(bucket.context, min(next(better, least), MAX_PARTITIONS))
    path = "split" if count > 1 else "single"
    if path != plan.path and (speedups._asdict()[path] or 0.0) <= MIN_GAIN:
        return plan
    return Plan(path, count, plan.tile)


def _partitions(bucket: Bucket, tile: str, lower: Tuned, upper: Tuned, cores: int | None) -> int:
    """Between two splits a power of the context, through both ends; beside one the law through
    that end, and never more than it has. Then, by ratio, the nearest count that the context can
    really be cut in and that keeps the cores about as busy as any; ties: the lower.
    """
    groups = row_groups(bucket.heads * bucket.q_len, tile)
    splits = [end for end in (lower, upper) if end.plan.path == "split"]
    counts = [_tasks(end) / groups for end in splits]  # as many tasks as the end has with its tile
    if len(counts) == 2:
        low, high = min(counts), max(counts)
        share = share_of(bucket.context, lower, upper)
        wanted = exp(log(counts[0]) * (1 - share) + log(counts[1]) * share)
    else:
        low, high = 2, counts[0]
        wanted = high * law(1.0, bucket, tile, 1) / law(1.0, splits[0].bucket, tile, 1)
    few, many = (min(max(2, n), MAX_PARTITIONS) for n in (floor(low), ceil(high)))
    real = sorted({pieces(bucket.context, count) for count in range(few, many + 1)})
    won_with = min((_waves(end, cores) for end in splits if cores), default=inf)
    shares = {count: _share(bucket, tile, count, cores, won_with) for count in real}
    least = NEARLY_AS_FULL * max(shares.values())
    fit = [count for count in real if shares[count] >= least]
    return min(fit, key=lambda count: round(abs(log(count / wanted)), 9))


def _share(bucket: Bucket, tile: str, partitions: int, cores: int | None, won_with: float) -> float:
    """Share of the cores that a split keeps busy; 1 for all where their number is unknown.

    `won_with` tells what a winner made of a wave: one that left cores idle shows that less than a
    wave wastes nothing, one that filled no more than one that a core needs one task at a time.
    """
    tasks = row_groups(bucket.heads * bucket.q_len, tile) * bucket.batch
    if not cores or (won_with < NEARLY_AS_FULL and tasks * partitions <= cores):
        return 1.0
    if won_with <= 1:
        return fill(bucket.context, partitions, tasks, cores)
    return busy(bucket.context, partitions, tasks, cores)


def _tasks(end: Tuned) -> int:
    """Tasks of one sequence in a tuned split."""
    return end.plan.partitions * row_groups(end.bucket.heads * end.bucket.q_len, end.plan.tile)


def _waves(end: Tuned, cores: int) -> float:
    """Tasks a core of a tuned split; infinite where the context could not be cut any finer, which
    says nothing about what would have been enough.
    """
    if end.plan.partitions >= pieces(end.bucket.context, MAX_PARTITIONS):
        return inf
    return _tasks(end) * end.bucket.batch / cores
