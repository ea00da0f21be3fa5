"""Tiles of the CUDA kernels and how they are launched: plain arithmetic, no MLX.

A tile says how many query rows a block takes at once. `r16` belongs to the small kernel (bulk
copies, from sm_90 on), `r64w` to the wide one (warpgroup products, sm_90 alone), `r16p` to the
portable one (from sm_80 on), `r8f` to the simple one in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ..shapes import (
    DEEPSEEK,
    DTYPE_BYTES,
    TOKEN_TILE,
    Geometry,
    Shape,
    effective_batch,
    piece_tokens,
)

OLDEST = 80  # compute capability 8.0: bfloat16 on tensor cores, asynchronous copies
MAX_BATCH = 65535  # blocks of a grid in its second dimension, and in its third
USUAL_CORES = 132  # where the driver tells none
_HOPPER = 90
# Shared memory that a block may ask for, by compute capability (CUDA programming guide).
_SHARED_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448, 110: 232448}
_LEAST_SHARED_BYTES = 101376  # of any since 8.0
_FEW_ROWS = 24  # up to here the small kernel pads less than the wide one
_MERGE_TEAMS = 16  # of 16 lanes, in a block of the merge
_MERGE_AHEAD = 8  # pieces that a lane loads at once
_MERGE_DIMS = 64  # of a row, a unit of the merge
MERGE_THREADS = 256


@dataclass(frozen=True)
class Tile:
    """`tokens` are copied at once, into one of `stages` places in shared memory."""

    kernel: str
    rows: int
    threads: int
    tokens: int = 0
    stages: int = 0

    def shared_bytes(self, geometry: Geometry, layout: str) -> int:
        """Dynamic shared memory of a block."""
        if self.kernel == "simple":
            return 0
        if self.kernel == "wide":  # most of Q, weights; tiles; largest scores, barriers
            return (
                (geometry.width - 64) * 128 + self.stages * self.tokens * geometry.width * 2 + 1024
            )
        # Of a row: weights in two parts, scores of four quarters.
        numbers = 2 * (self.tokens * 2 + 16) + 4 * (self.tokens + 4) * 4
        group = self.tokens // 8
        if layout == "paged":
            tile = 8 * (group * geometry.width * 2 + 16)
        else:
            tile = sum(8 * (group * width * 2 + 16) for width in geometry if width)
        fixed = 256 + self.rows * (8 + numbers)
        return ceil(fixed / 128) * 128 + self.stages * tile

    def refusal(self, shape: Shape, capability: int) -> str | None:
        """Why this tile is not for such a call on such a GPU; None if it is."""
        if (shape.dtype == "float32") != (self.kernel == "simple"):
            return f"the {self.kernel} kernel does not compute in {shape.dtype}"
        if self.kernel == "small" and capability < _HOPPER:
            return f"the small kernel needs sm_{_HOPPER} or later"
        if self.kernel == "wide" and capability != _HOPPER:
            return f"the wide kernel needs sm_{_HOPPER}"
        if self.kernel == "wide" and shape.geometry != DEEPSEEK:
            return f"the wide kernel is for {DEEPSEEK}"
        needed, there = self.shared_bytes(shape.geometry, shape.layout), shared_bytes(capability)
        if needed > there:
            return f"it takes {needed} bytes of shared memory, {there} are there"
        return None

    def defines(self, shape: Shape) -> dict[str, int | str]:
        """The kernel's constants."""
        return {
            **_numbers(shape),
            "PAGED": int(shape.layout == "paged"),
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "STAGES": self.stages,
            "SHARED": self.shared_bytes(shape.geometry, shape.layout),
        }


TILES = {
    "r8": Tile("small", 8, 288, 64, 2),
    "r16": Tile("small", 16, 288, 64, 2),
    "r24": Tile("small", 24, 288, 64, 2),
    "r32": Tile("small", 32, 288, 32, 5),
    "r64w": Tile("wide", 64, 384, 48, 3),
    "r16p": Tile("portable", 16, 256, 32, 2),
    "r32p": Tile("portable", 32, 256, 32, 2),
    "r8f": Tile("simple", 8, 256),
}


def merge_defines(shape: Shape) -> dict[str, int | str]:
    """Constants of the merge."""
    return {**_numbers(shape), "ROPE": 0, "PAGED": 0, "ROWS": 1}


def _numbers(shape: Shape) -> dict[str, int | str]:
    rank, rope = shape.geometry
    found: dict[str, int | str] = {"RANK": rank, "ROPE": rope, "BITS": "float"}
    if DTYPE_BYTES[shape.dtype] == 2:
        half = "bf16" if shape.dtype == "bfloat16" else "f16"
        found |= {"BITS": "unsigned short", "HALF": f'"{half}"'}
    return found


def capability(architecture: str) -> int:
    """90 for "sm_90"; 0 where it is no such name. Never raises."""
    digits = architecture.removeprefix("sm_")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 5 else 0


def shared_bytes(capability: int) -> int:
    """Shared memory that a block may have."""
    return _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)


def refusal(name: str, shape: Shape, capability: int) -> str | None:
    """Why the tile of that name can't take the shape; None if it can."""
    if name not in TILES:
        return f"the CUDA kernels' tiles are {', '.join(TILES)}"
    if shape.batch > MAX_BATCH:
        return f"the CUDA kernels take up to {MAX_BATCH} sequences"
    reason = TILES[name].refusal(shape, capability)
    return f"tile {name} is not for it: {reason}" if reason else None


def useful(shape: Shape, capability: int) -> tuple[str, ...]:
    """Tiles worth trying, the default first: legal ones that don't pay for many idle rows.

    The order is that of times on one H200 (driver 580.159.04, 2026-11-29).
    """
    return _useful(shape.rows, shape.dtype, shape.geometry, shape.layout, capability)


@lru_cache(maxsize=1024)
def _useful(
    rows: int, dtype: str, geometry: Geometry, layout: str, capability: int
) -> tuple[str, ...]:
    shape = Shape(1, 1, 1, dtype, geometry, layout=layout)
    small = ("r24", "r16", "r8")[2 - (rows - 1) // 8 :][:2]
    large = ("r64w", "r32", "r24" if rows <= 48 else "r16")
    portable = ("r16p",) if rows <= 16 else ("r32p", "r16p")
    for names in (small if rows <= _FEW_ROWS else large, portable, ("r8f",)):
        legal = [name for name in names if TILES[name].refusal(shape, capability) is None]
        if legal:
            return tuple(legal)
    return ()


def grid(tile: Tile, shape: Shape, piece: int) -> tuple[int, int, int]:
    """Threads of a launch: (row tiles x threads of a block, batch, pieces of a sequence), or where
    sequences differ (row tiles x threads of a block, all pieces or a few blocks more, in two).
    """
    rows = ceil(shape.rows / tile.rows) * tile.threads
    if shape.lengths:
        depth = ceil(work(shape.lengths, piece) / MAX_BATCH)
        return rows, ceil(work(shape.lengths, piece) / depth), depth
    return rows, shape.batch, max(1, ceil(shape.context / piece))


def piece_of(shape: Shape, partitions: int) -> int:
    """Tokens of a piece.

    A plan's partitions are those of a batch of equal sequences. Where they differ, pieces grow,
    to twice the length at most, until there are no more than that batch would have: a block too
    many is a wave of its own. Sequences of less than a piece don't count: they can't be cut in
    fewer, and their blocks end early. A split stays one.
    """
    piece, lengths = piece_tokens(shape.context, partitions), shape.lengths
    if not lengths or partitions == 1:
        return piece
    most = effective_batch(lengths) * partitions + sum(length <= piece for length in lengths)
    fewest = piece // TOKEN_TILE  # tiles of a piece
    enough = min(2 * fewest, piece_tokens(shape.context, 2) // TOKEN_TILE)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if work(lengths, middle * TOKEN_TILE) > most:
            fewest = middle + 1
        else:
            enough = middle
    return enough * TOKEN_TILE


def work(lengths: tuple[int, ...], piece: int) -> int:
    """How many pieces `work_list` has."""
    if piece >= max(lengths):
        return len(lengths)
    return sum(-(-length // piece) for length in lengths)


def work_list(lengths: tuple[int, ...], piece: int) -> list[tuple[int, int]]:
    """Sequence and number of every piece with tokens, long ones first; of an empty sequence none,
    unless each has one piece: then it writes the result.
    """
    least = 1 if piece >= max(lengths) else 0
    found = [
        (min(length - at * piece, piece), b, at)
        for b, length in enumerate(lengths)
        for at in range(max(least, -(-length // piece)))
    ]
    return [(b, at) for _, b, at in sorted(found, key=lambda each: -each[0])]


def merge_grid(shape: Shape, partitions: int, cores: int | None) -> tuple[int, int, int]:
    """Threads of the merge. A unit is 64 dims of a row; the kernel sees by the number of blocks how
    many teams share one, or how many a team takes.
    """
    units, cores = shape.rows * shape.geometry.kv_lora_rank // _MERGE_DIMS, cores or USUAL_CORES
    each = merge_units(units * shape.batch, partitions, cores)
    groups = 1 if each > 1 else merge_groups(units * shape.batch, partitions, cores)
    return ceil(units * groups / each / _MERGE_TEAMS) * MERGE_THREADS, shape.batch, 1


def merge_units(units: int, partitions: int, cores: int) -> int:
    """Units that a team of the merge takes: 2 where it can load them at once, and where that leaves
    enough blocks; else 1.
    """
    enough = units // 2 >= 4 * cores * _MERGE_TEAMS
    return 2 if 2 * partitions <= _MERGE_AHEAD and enough else 1


def merge_groups(units: int, partitions: int, cores: int) -> int:
    """Teams that share a unit of the merge, a power of two.

    As many as leave few pieces to each, then more until every core has work.
    """
    groups = 1
    while groups < _MERGE_TEAMS and groups * _MERGE_AHEAD < partitions:
        groups *= 2
    while groups < min(_MERGE_TEAMS, partitions) and units * groups // _MERGE_TEAMS < cores:
        groups *= 2
    return groups
