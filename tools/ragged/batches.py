"""Batches of unequal contexts, and the ways to look one up in a table of equal ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mla_tuner.plan import Plan
from mla_tuner.shapes import (
    CONTEXT_GRID,
    Bucket,
    Shape,
    bucket_of,
    effective_batch,
    piece_tokens,
    pieces,
)

PIECES = 8  # of the longest context: the count that pieces are counted for, and the floor
Lengths = tuple[int, ...]


# Of a stored plan, its bucket, the batch and the counts that may run: the count that does.
Fit = Callable[[Plan, Bucket, Shape, Sequence[int]], int]


@dataclass(frozen=True)
class Rule:
    """A way to look a batch up: `key` gives the context and batch of the bucket, `fit` the count of
    partitions that its native plan then runs with.
    """

    name: str
    key: Callable[[Lengths], tuple[int, float]]
    fit: Fit = lambda plan, bucket, shape, counts: plan.partitions

    def bucket(self, shape: Shape) -> Bucket:
        """Rounded as the policy rounds."""
        context, batch = self.key(shape.all_lengths)
        return bucket_of(context, max(1, round(batch)), shape.heads, shape.dtype)

    def plan(self, stored: Plan, shape: Shape, known: Iterable[Plan]) -> Plan:
        """What to run for a ragged batch: the plan of its bucket, or a known one of that tile."""
        if not stored.native:
            return stored
        counts = sorted(p.partitions for p in known if p.native and p.tile == stored.tile)
        count = pieces(shape.context, self.fit(stored, self.bucket(shape), shape, counts))
        return Plan("split" if count > 1 else "single", count, stored.tile)


def _floor(plan: Plan, bucket: Bucket, shape: Shape, counts: Sequence[int]) -> int:
    return min((c for c in counts if c >= max(PIECES, plan.partitions)), default=plan.partitions)


def _same_tasks(plan: Plan, bucket: Bucket, shape: Shape, counts: Sequence[int]) -> int:
    """The most partitions that make no more pieces in all than the plan makes of its bucket; as
    they are where less than half of them would be left.
    """
    most = bucket.batch * plan.partitions
    fit = [c for c in counts if 2 * c >= plan.partitions and all_pieces(shape, c) <= most]
    return max(fit, default=plan.partitions)


def all_pieces(shape: Shape, partitions: int) -> int:
    """Pieces of all sequences when the longest is cut in so many."""
    piece = piece_tokens(shape.context, partitions)
    return sum(-(-length // piece) for length in shape.all_lengths)


def _quotient(lengths: Lengths) -> float:
    return sum(lengths) / max(lengths)


RULES = (
    Rule("sequences", lambda n: (max(n), len(n))),
    Rule("mean context, sequences", lambda n: (max(CONTEXT_GRID[0], sum(n) // len(n)), len(n))),
    Rule("sum / longest", lambda n: (max(n), effective_batch(n))),
    Rule("sum / longest, up", lambda n: (max(n), -(-sum(n) // max(n)))),
    Rule("sum / longest, down", lambda n: (max(n), sum(n) // max(n))),
    Rule("sequences of half the longest or more", lambda n: (max(n), _long(n))),
    Rule("square of the sum / sum of squares", lambda n: (max(n), _participation(n))),
    Rule(f"pieces of {PIECES} partitions / {PIECES}", lambda n: (max(n), _in_pieces(n))),
    Rule(f"sum / longest, {PIECES} partitions or more", lambda n: (max(n), _quotient(n)), _floor),
    Rule("sum / longest, as many pieces in all", lambda n: (max(n), _quotient(n)), _same_tasks),
)


def _long(lengths: Lengths) -> int:
    return sum(2 * length >= max(lengths) for length in lengths)


def _in_pieces(lengths: Lengths) -> float:
    """Pieces of all sequences over those of the longest."""
    shape = Shape(max(lengths), len(lengths), 1, lengths=lengths)
    return all_pieces(shape, PIECES) / pieces(shape.context, PIECES)


def _participation(lengths: Lengths) -> float:
    """All of n sequences count where they are equal, one where it has all the work."""
    return sum(lengths) ** 2 / sum(length * length for length in lengths)


def mixes(longest: int, seed: int = 5) -> dict[str, Lengths]:
    """Batches by name; a batch's lengths in random order, as a server's come."""
    rng = random.Random(seed)
    found: dict[str, list[float]] = {}
    for long, short, part in (
        *((1, 1, 2), (1, 3, 32), (1, 7, 64), (1, 7, 8), (1, 15, 32)),
        *((2, 6, 32), (2, 6, 8), (3, 13, 32), (4, 4, 16)),
    ):
        found[f"{long} long, {short} of 1/{part}"] = [1.0] * long + [1 / part] * short
    found["halving, 6"] = [2.0**-k for k in range(6)]
    for count in (4, 8):
        found[f"uniform, {count}"] = [1.0] + [rng.uniform(1 / 64, 1) for _ in range(count - 1)]
    for count in (8, 16):
        found[f"log-uniform, {count}"] = [1.0] + [64 ** -rng.random() for _ in range(count - 1)]
    return {
        name: tuple(max(1, round(longest * share)) for share in rng.sample(shares, len(shares)))
        for name, shares in found.items()
    }


def batches(grid: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[str, Shape]]:
    """Every mix of at most so many sequences, by longest context and heads."""
    for longest, heads in grid:
        for name, lengths in mixes(longest).items():
            if len(lengths) <= most:
                yield name, Shape(longest, len(lengths), heads, lengths=lengths)
