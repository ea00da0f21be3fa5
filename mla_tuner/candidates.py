"""The legal ways to run a bucket on a device, most promising first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import MLX, Plan
from .shapes import MAX_PARTITIONS

if TYPE_CHECKING:
    from .backends import Backend
    from .device import Device
    from .shapes import Bucket, Shape

TOKEN_TILE = 64  # tokens that a kernel takes at once; a piece of the context is a multiple of it
ASSUMED_CORES = 8  # where the count can't be read: the smallest Apple GPU that is sold
MAX_TASKS_PER_CORE = 8  # beyond that more pieces only add merge work
LOAD_ROWS = 4  # fetching and converting a token costs about as much as scoring this many rows
MERGE_TOKENS = 2  # merging one row of one piece costs about as much as scoring this many tokens


def candidates(bucket: Bucket, device: Device, backend: Backend) -> list[Plan]:
    """Every legal plan of a bucket once: `mlx`, `mlx_rows`, then our kernel by the analytic prior.

    `single` comes once a tile, `split` once a tile and partition count. Without a native kernel
    only the two MLX paths are left.
    """
    shape = bucket.shape
    native = [Plan("single", 1, tile) for tile in backend.tiles(shape.rows)]
    native += [
        Plan("split", partitions, tile)
        for tile in backend.tiles(shape.rows)
        for partitions in partition_counts(shape, device.cores, tile)
    ]
    legal = [plan for plan in native if backend.refusal(plan, shape) is None]
    return [
        MLX,
        Plan("mlx_rows"),
        *sorted(legal, key=lambda plan: prior(plan, shape, device.cores)),
    ]


def partition_counts(shape: Shape, cores: int | None, tile: str) -> list[int]:
    """Partition counts worth a measurement for one tile, ascending."""
    width = cores or ASSUMED_CORES
    tasks = row_groups(shape.rows, tile) * shape.batch  # of one partition
    near = range(2, 4 * width + 1)  # every count up to a few per core: waves make steps
    powers = (1 << k for k in range(1, 7))  # the long end needs no finer grid: it is flat
    wanted = {p for p in (*near, *powers) if p <= MAX_PARTITIONS}
    return sorted(
        p
        for p in wanted
        # A count that is cut in fewer pieces would be another plan under a wrong name.
        if pieces(shape.context, p) == p
        # Two always stays: it is the evidence that splitting doesn't pay here.
        and (p == 2 or tasks * p <= MAX_TASKS_PER_CORE * width)
    )


def pieces(context: int, partitions: int) -> int:
    """Pieces that a context is really cut in when `partitions` are asked for; at least 1."""
    return max(1, -(-context // piece_tokens(context, partitions)))


def piece_tokens(context: int, partitions: int) -> int:
    """Tokens of one piece: ceil(context / partitions), rounded up to the token tile."""
    even = -(-context // partitions)
    return max(TOKEN_TILE, -(-even // TOKEN_TILE) * TOKEN_TILE)


def row_groups(rows: int, tile: str) -> int:
    """Tasks that the rows of one sequence need: "r16" takes 16 rows a task."""
    return -(-rows // rows_per_task(tile))


def rows_per_task(tile: str) -> int:
    """Query rows that a task of this tile takes: "r16" means 16."""
    return int(tile.lstrip("r"))


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
