"""What is timed: shapes, plans, and how many caches. Plain arithmetic, no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from mla_tuner.backends import cuda_tiles
from mla_tuner.candidates import row_groups
from mla_tuner.plan import Plan
from mla_tuner.shapes import MAX_PARTITIONS, Shape, pieces

BLOCK_SIZE = 64  # tokens; FlashMLA takes no other
# Batch, heads, context.
SHAPES = (
    (1, 16, 8192),
    (1, 16, 32768),
    (1, 20, 32768),
    (1, 128, 32768),
    (1, 16, 131072),
    (1, 128, 131072),
    (8, 16, 8192),
    (8, 128, 8192),
    (32, 16, 8192),
    (32, 128, 8192),
)
USUAL_CACHES, LEAST_CACHES = 27, 19  # a model has that many layers, or more
MUCH_BYTES = 16 << 30  # of caches; beyond that the fewest that will do
COLD = 3  # times the L2 cache that the caches of a ring take together
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
FEWEST_BUSY = 4  # a plan that leaves all but a fourth of the GPU idle is not worth the time


def shapes_of(text: str, q_len: int = 1, dtype: str = "bfloat16", lengths: str = "") -> list[Shape]:
    """Shapes of "1x16x8192,8x128x8192"; "" means those of the table.

    lengths: "131072,2048*15": sequences of these lengths instead of batch and context.

    Raises:
        ValueError: that is no such text.
    """
    triples = [_numbers(each, "x", 3) for each in text.split(",")] if text else list(SHAPES)
    ragged = tuple(_lengths(lengths)) if lengths else ()
    found = [
        Shape(max(ragged), len(ragged), heads, dtype, q_len=q_len, lengths=ragged)
        if ragged
        else Shape(context, batch, heads, dtype, q_len=q_len)
        for batch, heads, context in triples
    ]
    return list(dict.fromkeys(found))


def label_of(shape: Shape) -> str:
    """Batch x heads x context, and what is unusual about it."""
    label = f"{shape.batch} x {shape.heads} x {shape.context}"
    if shape.q_len > 1:
        label += f" q{shape.q_len}"
    if len(set(shape.all_lengths)) > 1:
        label += " ragged"
    return label if shape.dtype == "bfloat16" else f"{label} {shape.dtype}"


def caches_of(shape: Shape, l2_bytes: int, wanted: int = USUAL_CACHES) -> int:
    """How many distinct caches: together never less than `COLD` times the L2 cache."""
    count = wanted if wanted * shape.cache_bytes <= MUCH_BYTES else LEAST_CACHES
    return max(count, LEAST_CACHES, ceil(COLD * l2_bytes / max(1, shape.cache_bytes)))


def blocks_of(shape: Shape) -> list[int]:
    """Pages of each sequence."""
    return [ceil(length / BLOCK_SIZE) for length in shape.all_lengths]


def plans_of(text: str, shape: Shape, capability: int, cores: int) -> list[Plan]:
    """Plans of "r16:128,r64w:64" (tile:partitions); of "sweep", every useful tile with every count
    that may pay; of "best", the first tile with those counts, and the second where rows fill it.

    Raises:
        ValueError: that is no such text, or a plan can't run here.
    """
    if text in ("best", "sweep"):
        tiles = cuda_tiles.useful(shape, capability)
        tiles = tiles if text == "sweep" else tiles[:2]
        return [plan for tile in tiles for plan in _counted(tile, shape, cores)]
    named = (_plan(each, shape, capability) for each in text.split(","))
    return list(dict.fromkeys(named))  # a short context makes some of them one


def _counted(tile: str, shape: Shape, cores: int) -> Iterator[Plan]:
    """From a quarter of the cores at work to two blocks on each."""
    tasks = row_groups(shape.rows, tile) * shape.batch
    wanted = (*COUNTS, cores // tasks, 2 * cores // tasks)
    legal = (n for n in wanted if 0 < n <= MAX_PARTITIONS)
    real = sorted({pieces(shape.context, n) for n in legal})
    few = [n for n in real if tasks * n <= 2 * cores] or real[:1]
    enough = [n for n in few if tasks * n * FEWEST_BUSY >= cores] or few[-1:]
    yield from (_of(tile, n) for n in enough)


def _plan(text: str, shape: Shape, capability: int) -> Plan:
    tile, colon, count = text.partition(":")
    if not colon or not re.fullmatch(r"[1-9]\d*", count):
        raise ValueError(f"expected a plan as TILE:PARTITIONS; got {text!r}")
    plan = _of(tile, int(count)).cut(shape.context)
    reason = cuda_tiles.refusal(tile, shape, capability)
    if reason:
        raise ValueError(f"plan {text} can't run on {label_of(shape)}: {reason}")
    return plan


def _of(tile: str, count: int) -> Plan:
    return Plan("split", count, tile) if count > 1 else Plan("single", 1, tile)


def short(plan: Plan) -> str:
    """As the command line takes it."""
    return f"{plan.tile}:{plan.partitions}"


def _numbers(text: str, sign: str, count: int) -> tuple[int, ...]:
    parts = text.split(sign)
    if len(parts) != count or not all(re.fullmatch(r"[1-9]\d*", part) for part in parts):
        raise ValueError(f"expected BATCH{sign}HEADS{sign}CONTEXT; got {text!r}")
    return tuple(map(int, parts))


def _lengths(text: str) -> Iterator[int]:
    for part in text.split(","):
        length, star, count = part.partition("*")
        if not length.isdigit() or (star and not count.isdigit()):
            raise ValueError(f"expected lengths as 131072,2048*15; got {text!r}")
        yield from [int(length)] * (int(count) if star else 1)


def some_of(count: int) -> list[int]:
    """The first, the middle and the last of so many."""
    return sorted({0, count // 2, count - 1})
