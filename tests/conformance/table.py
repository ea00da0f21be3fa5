"""The cases that every back end must pass: a covering design, not the full cross product.

Every two values of different factors meet in at least one case, which finds what two conditions
break together, in some hundred cases instead of a million.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

from mla_tuner.cases import Case, make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import DTYPES, GEOMETRIES, MAX_PARTITIONS, Geometry, Shape

TILE = 64  # tokens that a kernel takes at once


class Memory(NamedTuple):
    """Where the cache lies. starts: whether sequences begin at different slots."""

    layout: str
    block_size: int = 0
    strided: bool = False
    starts: bool = False


FACTORS: dict[str, tuple[Any, ...]] = {
    "heads": (1, 3, 5, 12, 16, 20, 63, 96, 128),
    "q_len": (1, 2, 3, 8),
    "dtype": DTYPES,
    "geometry": GEOMETRIES,
    "memory": (
        *(Memory("paged", block_size) for block_size in (8, 16, 32, 64)),
        Memory("dense"),
        Memory("dense", strided=True),
        Memory("dense", starts=True),
        Memory("dense", strided=True, starts=True),
    ),
    "lengths": (
        *((n,) for n in (0, 1, 2, TILE - 1, TILE, TILE + 1, 100, 4096)),
        (4096, 1, 100),  # one long among short
        (TILE + 1, 0, TILE, 2, 300),
        (200, 200, 200),
    ),
    "partitions": (1, 2, 3, 5, 8, 64, MAX_PARTITIONS),  # short lengths: more than tokens or pieces
    "tile": tuple(range(8)),  # of those that the back end has for the rows
    "logit_scale": (1.0, 30.0),
}


class Entry(NamedTuple):
    heads: int
    q_len: int
    dtype: str
    geometry: Geometry
    memory: Memory
    lengths: tuple[int, ...]
    partitions: int
    tile: int
    logit_scale: float

    @property
    def shape(self) -> Shape:
        batch, longest = len(self.lengths), max(self.lengths)
        where = self.memory.layout
        kind = (self.heads, self.dtype, self.geometry, self.q_len, where)
        return Shape(longest, batch, *kind, self.lengths if batch > 1 else ())

    def case(self, seed: int) -> Case:
        starts = [5 * b + 3 for b in range(len(self.lengths))] if self.memory.starts else None
        return make_case(
            self.shape,
            seed=seed,
            block_size=self.memory.block_size or 32,
            starts=starts,
            strided=self.memory.strided,
            logit_scale=self.logit_scale,
        )

    def plan(self, tiles: tuple[str, ...]) -> Plan:
        """The native plan, for a back end with these tiles."""
        tile = tiles[self.tile % len(tiles)]
        path = "single" if self.partitions == 1 else "split"
        return Plan(path, self.partitions, tile)

    def __str__(self) -> str:
        memory = f"{self.memory.layout}{self.memory.block_size or ''}"
        memory += "-strided" * self.memory.strided + "-padded" * self.memory.starts
        lengths = "_".join(map(str, self.lengths))
        return (
            f"h{self.heads}-q{self.q_len}-{self.dtype}-{self.geometry}-{memory}-"
            f"n{lengths}-p{self.partitions}-t{self.tile}-x{self.logit_scale:g}"
        )


def pairs(entry: Entry) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return combinations(entry._asdict().items(), 2)


def covering(seed: int = 1, tries: int = 30) -> list[Entry]:
    """Greedy: of some random entries around an uncovered pair, take the one that covers most."""
    rng = random.Random(seed)
    names = list(FACTORS)
    # A list, not a set: string hashes differ from run to run, and the table must not.
    missing = {
        ((a, x), (b, y)): None
        for a, b in combinations(names, 2)
        for x, y in product(FACTORS[a], FACTORS[b])
    }
    table = []
    while missing:
        wanted = dict(next(iter(missing)))
        offers = [
            Entry(**{name: wanted.get(name, rng.choice(FACTORS[name])) for name in names})
            for _ in range(tries)
        ]
        best = max(offers, key=lambda entry: sum(pair in missing for pair in pairs(entry)))
        for pair in pairs(best):
            missing.pop(pair, None)
        table.append(best)
    return table


# 40000 tokens need few cases: beyond 4096 only the number of tiles grows.
LONG = [
    Entry(16, 1, "bfloat16", GEOMETRIES[0], Memory("paged", 32), (40000,), 8, 0, 1.0),
    Entry(128, 1, "float16", GEOMETRIES[0], Memory("dense"), (40000,), 2, 1, 1.0),
    Entry(5, 2, "float32", GEOMETRIES[3], Memory("paged", 16), (40000, 7), 32, 0, 1.0),
    Entry(
        20, 1, "bfloat16", GEOMETRIES[1], Memory("dense", strided=True), (100, 40000), 5, 0, 30.0
    ),
]
TABLE = [*covering(), *LONG]
