"""What one device's winners say about the contexts between them: law, interpolation, thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt

from .candidates import ASSUMED_CORES, TOKEN_TILE, pieces, row_groups
from .plan import Plan
from .shapes import Bucket


@dataclass(frozen=True)
class Threshold:
    """Contexts from which our kernel wins, and from which splitting wins, up to the longest tuned.

    None: not even on the longest tuned context. `kappa` is the constant of `law`; None without a
    split winner.
    """

    native_from: int | None
    split_from: int | None
    kappa: float | None


def law(kappa: float, bucket: Bucket, tile: str, cores: int) -> float:
    """Partitions ~ kappa * sqrt(work * cores) / tasks.

    Work counts the context tiles of all sequences, tasks what a single partition gives to do. It is
    the minimum of (scan time ~ 1/partitions) + (merge time ~ partitions).
    """
    tasks = row_groups(bucket.heads * bucket.q_len, tile) * bucket.batch
    work = bucket.batch * -(-bucket.context // TOKEN_TILE)
    return kappa * sqrt(work * cores) / tasks


def threshold(winners: Mapping[Bucket, Plan], cores: int | None) -> Threshold:
    """The threshold of winners that differ only in context. Never beyond what was tuned."""
    longest_first = sorted(winners.items(), reverse=True)
    native_from = split_from = None
    for bucket, plan in longest_first:  # a win counts only if all longer contexts won too
        if not plan.native:
            break
        native_from = bucket.context
    for bucket, plan in longest_first:
        if plan.path != "split":
            break
        split_from = bucket.context
    logs = [
        log(plan.partitions / law(1.0, bucket, plan.tile, cores or ASSUMED_CORES))
        for bucket, plan in longest_first
        if plan.path == "split"
    ]
    return Threshold(native_from, split_from, exp(sum(logs) / len(logs)) if logs else None)


def between(context: int, lower: tuple[int, Plan], upper: tuple[int, Plan]) -> Plan | None:
    """The plan at a context between two tuned ones; None where their paths differ.

    Partitions follow a power of the context, as the law says, through both ends. The tile is that
    of the end that is nearer by ratio.
    """
    (low, below), (high, above) = lower, upper
    if below.path != above.path:
        return None
    share = log(context / low) / log(high / low)
    tile = (below if share < 0.5 else above).tile
    if below.path != "split":
        return Plan(below.path, 1, tile)
    wanted = round(exp(log(below.partitions) * (1 - share) + log(above.partitions) * share))
    return Plan("split", pieces(context, wanted), tile)
