"""The exact shape of a decode call, and the bucket it is rounded to for look-up."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2, sqrt
from typing import NamedTuple


class Geometry(NamedTuple):
    """Width of one cached token: `kv_lora_rank` latent numbers, then `rope_dim` rope numbers."""

    kv_lora_rank: int
    rope_dim: int

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    def __str__(self) -> str:
        return f"{self.kv_lora_rank}+{self.rope_dim}"


DEEPSEEK = Geometry(512, 64)  # DeepSeek V2/V3, Kimi, GLM-4.7-Flash
GEOMETRIES = (DEEPSEEK, Geometry(512, 0), Geometry(256, 64), Geometry(256, 32))
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES = tuple(DTYPE_BYTES)
LAYOUTS = ("paged", "dense")
MAX_CONTEXT = 1 << 30  # the kernel counts tokens in an int
MAX_BATCH = 1 << 16
MAX_TUNED_BATCH = 256
MAX_HEADS = 128
MAX_Q_LEN = 8
MAX_PARTITIONS = 256  # two blocks on each of an H200's 132 multiprocessors, nearly
TOKEN_TILE = 64  # pieces of the context are multiples of it, and it of any kernel's steps


@dataclass(frozen=True)
class Shape:
    """One decode problem.

    `context`: attended tokens of the longest sequence, the new ones included. `lengths` gives every
    sequence's context where they differ; without it all are `context` long.
    """

    context: int
    batch: int
    heads: int
    dtype: str = "bfloat16"
    geometry: Geometry = DEEPSEEK
    q_len: int = 1
    layout: str = "paged"
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("context", self.context, 0, MAX_CONTEXT),
            ("batch", self.batch, 1, MAX_BATCH),
            ("heads", self.heads, 1, MAX_HEADS),
            ("q_len", self.q_len, 1, MAX_Q_LEN),
        ):
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"[Shape] expected {name} in {low}..{high}; got {value!r}")
        for name, got, known in (
            ("dtype", self.dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("geometry", self.geometry, GEOMETRIES),
        ):
            if got not in known:
                raise ValueError(f"[Shape] expected {name} in {known}; got {got!r}")
        if self.lengths and (len(self.lengths) != self.batch or max(self.lengths) != self.context):
            raise ValueError(
                f"[Shape] expected {self.batch} lengths with maximum {self.context}; "
                f"got {self.lengths}"
            )

    @property
    def all_lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.context,) * self.batch

    @property
    def rows(self) -> int:
        """Query rows that share one pass over a sequence's latent."""
        return self.heads * self.q_len

    @property
    def cache_bytes(self) -> int:
        """Bytes of latent and rope cache that must be read at least once."""
        return sum(self.all_lengths) * self.geometry.width * DTYPE_BYTES[self.dtype]

    @property
    def flop(self) -> int:
        """Floating-point operations of scores and values: 2 * rows * tokens * (2 * rank + rope)."""
        width = self.geometry.width + self.geometry.kv_lora_rank
        return 2 * self.rows * sum(self.all_lengths) * width

    @property
    def bucket(self) -> Bucket:
        return bucket_of(
            self.context,
            effective_batch(self.all_lengths),
            self.heads,
            self.dtype,
            self.geometry,
            self.q_len,
            self.layout,
        )

    def __str__(self) -> str:
        ragged = " ragged" if len(set(self.all_lengths)) > 1 else ""
        q_len = f" q_len {self.q_len}" if self.q_len > 1 else ""
        return (
            f"context {self.context} batch {self.batch} heads {self.heads} {self.dtype} "
            f"{self.geometry} {self.layout}{q_len}{ragged}"
        )


class Bucket(NamedTuple):
    """Rounded shape that a plan is stored for. `context` 0: outside the grid, nothing is stored."""

    context: int
    batch: int
    heads: int
    dtype: str
    kv_lora_rank: int
    rope_dim: int
    q_len: int
    layout: str

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.kv_lora_rank, self.rope_dim)

    @property
    def shape(self) -> Shape:
        """The shape that is measured for this bucket."""
        return Shape(
            self.context, self.batch, self.heads, self.dtype, self.geometry, self.q_len, self.layout
        )

    def __str__(self) -> str:
        return str(self.shape)


# 2^k and 1.5 * 2^k from 1K to 1M, and the geometric means between neighbours.
CONTEXT_GRID = tuple(sorted([1 << k for k in range(10, 21)] + [3 << k for k in range(9, 19)]))
_CONTEXT_EDGES = (
    ceil(sqrt(768 * 1024)),
    *(ceil(sqrt(a * b)) for a, b in pairwise(CONTEXT_GRID)),
    ceil(sqrt((1 << 20) * (3 << 19))),
)
_CONTEXT_OF = (0, *CONTEXT_GRID, 0)


def _nearest_power(n: int) -> int:
    return 1 << round(log2(n))


# q_len and small batches by table: the look-up in serving has a microsecond.
_POWER = (0, *(_nearest_power(n) for n in range(1, 257)))


def effective_batch(lengths: tuple[int, ...] | list[int]) -> int:
    """max(1, round(sum / longest)): a ragged batch counts by its work."""
    longest = max(lengths, default=0)
    return max(1, round(sum(lengths) / longest)) if longest > 0 else 1


def bucket_of(
    context: int,
    batch: int,
    heads: int,
    dtype: str,
    geometry: Geometry = DEEPSEEK,
    q_len: int = 1,
    layout: str = "paged",
) -> Bucket:
    """The bucket of a shape: context to the nearest grid point, batch and q_len to powers of two.

    `batch` is the effective batch. The rest is kept exactly. Never raises for int input.
    """
    return Bucket(*bucket_fields(context, batch, heads, dtype, geometry, q_len, layout))


def bucket_fields(
    context: int,
    batch: int,
    heads: int,
    dtype: str,
    geometry: Geometry,
    q_len: int,
    layout: str,
) -> tuple[int, int, int, str, int, int, int, str]:
    """A bucket as a plain tuple, equal to it as a key: a named one takes twice the time to make."""
    return (
        _CONTEXT_OF[bisect_right(_CONTEXT_EDGES, context)],
        _POWER[batch] if 0 < batch < 257 else _nearest_power(max(batch, 1)),
        heads,
        dtype,
        geometry[0],
        geometry[1],
        _POWER[q_len] if 0 < q_len < 257 else 0,
        layout,
    )


def pieces(context: int, partitions: int) -> int:
    """Pieces that a context is really cut in when `partitions` are asked for; at least 1."""
    return max(1, -(-context // piece_tokens(context, partitions)))


def piece_tokens(context: int, partitions: int) -> int:
    """Tokens of one piece: ceil(context / partitions), rounded up to the token tile."""
    even = -(-context // partitions)
    return max(TOKEN_TILE, -(-even // TOKEN_TILE) * TOKEN_TILE)
