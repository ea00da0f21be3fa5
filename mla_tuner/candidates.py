"""The legal ways to run a bucket on a device, most promising first."""

from __future__ import annotations

import re
from math import sqrt
from typing import TYPE_CHECKING

from .plan import MLX_PLANS, Plan
from .shapes import MAX_PARTITIONS, TOKEN_TILE, piece_tokens, pieces

if TYPE_CHECKING:
    from .backends import Backend
    from .device import Device
    from .shapes import Bucket, Shape

ASSUMED_CORES = 8  # where the count can't be read: the smallest Apple GPU that is sold
USUAL_ROWS = 16  # where a plan leaves the tile to the back end
MAX_TASKS_PER_CORE = 8  # beyond that more pieces only add merge work
LOAD_ROWS = 4  # fetching and converting a token costs about as much as scoring this many rows
MERGE_TOKENS = 2  # merging one row of one piece costs about as much as scoring this many tokens

# What `gates` and `fits` go by, beside the shape of the law below.
MIN_GAIN = 1.02  # a plan replaces mlx only where its interval's lower end clears this speed-up
# One H200 (driver 580.159.04, 2026-11-29), 16 heads of bfloat16, batch 1: 32, 64 and 128 partitions
# were best at 2K, 8K and 32K; 0.5 gives 32, 65 and 130. A server's kernels have used 1.2 (AITER).
KAPPA = 0.5
# A group that is alone on a core waits for memory: Metal's kernels want two (counted under an
# emulator, 2026-11-29), and two threads' tasks even out what other processes take on a CPU.
TASKS_PER_CORE = 2
# FlashAttention 3's rule: waves need not be full, only nearly as full as the fullest there is. One
# block more than a wave cost 35 to 50 % on the H200 above.
NEARLY_AS_FULL = 0.85


def candidates(bucket: Bucket, device: Device, backend: Backend) -> list[Plan]:
    """Every legal plan of a bucket once: MLX's own, then our kernel by the analytic prior.

    `single` comes once a tile, `split` once a tile and partition count. Without a native kernel
    only the MLX paths are left.
    """
    shape = bucket.shape
    native = [Plan("single", 1, tile) for tile in backend.tiles(shape)]
    native += [
        Plan("split", partitions, tile)
        for tile in backend.tiles(shape)
        for partitions in partition_counts(shape, device.cores, tile)
    ]
    others = [plan for plan in MLX_PLANS if backend.refusal(plan, shape) is None]
    # With their LSE, which the tuner checks, too.
    legal = [plan for plan in native if backend.refusal(plan, shape, want_lse=True) is None]
    return [
        *others,
        *sorted(legal, key=lambda plan: prior(plan, shape, device.cores)),
    ]


def partition_counts(shape: Shape, cores: int | None, tile: str) -> list[int]:
    """Partition counts worth a measurement for one tile, ascending."""
    width = cores or ASSUMED_CORES
    tasks = row_groups(shape.rows, tile) * shape.batch  # of one partition
    near = range(2, 4 * width + 1)  # every count up to a few per core: waves make steps
    powers = (1 << k for k in range(1, 9))  # the long end needs no finer grid: it is flat
    wanted = {p for p in (*near, *powers) if p <= MAX_PARTITIONS}
    return sorted(
        p
        for p in wanted
        # A count that is cut in fewer pieces would be another plan under a wrong name.
        if pieces(shape.context, p) == p
        # Two always stays: it is the evidence that splitting doesn't pay here.
        and (p == 2 or tasks * p <= MAX_TASKS_PER_CORE * width)
    )


def law(kappa: float, bucket: Bucket, tile: str, cores: int) -> float:
    """Partitions ~ kappa * sqrt(work * cores) / tasks.

    Work counts the context tiles of all sequences, tasks what a single partition gives to do. It is
    the minimum of (scan time ~ 1/partitions) + (merge time ~ partitions).
    """
    tasks = row_groups(bucket.heads * bucket.q_len, tile) * bucket.batch
    work = bucket.batch * -(-bucket.context // TOKEN_TILE)
    return kappa * sqrt(work * cores) / tasks


def fill(context: int, partitions: int, tasks: int, slots: int) -> float:
    """Share of the slots' time that is work: the last wave may not be full, the last piece short.

    `tasks` are those of one partition.
    """
    waves = -(-tasks * pieces(context, partitions) // slots)
    return tasks * context / (slots * waves * piece_tokens(context, partitions))


def busy(context: int, partitions: int, tasks: int, cores: int) -> float:
    """Share of the device that works, whether a core takes one task at a time or two."""
    slots = (cores, TASKS_PER_CORE * cores)
    return min(fill(context, partitions, tasks, each) for each in slots)


def row_groups(rows: int, tile: str) -> int:
    """Tasks that the rows of one sequence need: "r16" takes 16 rows a task."""
    return -(-rows // rows_per_task(tile))


def rows_per_task(tile: str) -> int:
    """Query rows that a task of this tile takes: 16 for "r16" and "r16t8". Never raises."""
    named = re.fullmatch(r"[rv]([1-9]\d{0,3})(?:t\d+)?[a-z]?", tile, re.ASCII)
    return int(named[1]) if named else USUAL_ROWS


def prior(plan: Plan, shape: Shape, cores: int | None) -> float:
    """Relative time of a native plan: waves of pieces, then the merge. Good for ordering only.

    One unit is one row against one token on one core.
    """
    width = cores or ASSUMED_CORES
    tasks = row_groups(shape.rows, plan.tile) * shape.batch * plan.partitions
    task_rows = min(shape.rows, rows_per_task(plan.tile)) + LOAD_ROWS
    scan = -(-tasks // width) * piece_tokens(shape.context, plan.partitions) * task_rows
    merged_rows = shape.rows * shape.batch * plan.partitions if plan.path == "split" else 0
    return scan + MERGE_TOKENS * merged_rows / min(width, shape.rows * shape.batch)
