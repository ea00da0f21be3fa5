"""Probe inputs with a float64 truth: for tests, `mla-tune verify`, benchmarks and the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .backends import Backend
from .caches import Cache, DenseCache, PagedCache
from .plan import MLX_PLANS, Plan
from .shapes import DTYPE_BYTES, GEOMETRIES, Geometry, Shape

Floats = NDArray[np.float64]
Bits = NDArray[Any]  # values of any dtype as unsigned integers

# Row relative L2 against float64. Rounding the output alone costs up to 2^-9 (bfloat16) and 2^-12
# (float16) in one number, about 0.6 of that in a row; the rest is margin for fp32 sums.
TOLERANCE = {"bfloat16": 2.5e-3, "float16": 4e-4, "float32": 1e-5}
# MLX's own paths round scores and weights to the dtype, and GPUs may multiply float32 as TF32.
MLX_TOLERANCE = {"bfloat16": 6e-2, "float16": 8e-3, "float32": 2e-3}
# Absolute; summed in fp32, whatever the dtype.
LSE_TOLERANCE = 2e-5
MLX_LSE_TOLERANCE = 2e-3
# Added for each unit of |q| * |k| * scale beyond NORMAL_REACH; that bounds a score and the terms of
# its sum. fp32 sums of terms in the hundreds are off by 1e-4, and exp() passes that on: MLX in
# float32 errs as much. Rows get half, for what all scores of a row share cancels there.
LARGE_SCORE_ROW_TOLERANCE = 2.0**-22
LARGE_SCORE_LSE_TOLERANCE = 2.0**-21
NORMAL_REACH = 64.0  # that of normally distributed q and k is about 40

SCALE = 192**-0.5  # DeepSeek's: qk_nope_head_dim 128 + qk_rope_head_dim 64
WILD_BLOCK = 2147480000  # in table entries past the end: whoever reads them is caught
_CHUNK = 4096  # tokens of the reference that are held in float64 at once
_PIECE_BYTES = 64 << 20  # of random numbers that a large pool repeats: making more takes seconds


@dataclass(frozen=True)
class _Format:
    """How a dtype lies in memory, and which bits make a random one of 2^-3..2 in magnitude."""

    dtype: mx.Dtype
    bits: np.dtype[Any]
    mask: int  # sign, the two low bits of the exponent, mantissa
    exponent: int  # the exponent of 2^-3; its two low bits are 0
    nan: int

    def random(self, rng: np.random.Generator, shape: Sequence[int]) -> Bits:
        count = int(np.prod(shape))
        words = rng.bit_generator.random_raw(-(-count * self.bits.itemsize // 8))
        bits = np.asarray(words).view(self.bits)[:count]
        bits &= self.bits.type(self.mask)
        bits |= self.bits.type(self.exponent)
        return bits.reshape(shape)

    def array(self, bits: Bits) -> mx.array:
        array = mx.array(bits).view(self.dtype)
        mx.eval(array)
        return array


_FORMATS = {
    "bfloat16": _Format(mx.bfloat16, np.dtype(np.uint16), 0x81FF, 0x3E00, 0x7FC0),
    "float16": _Format(mx.float16, np.dtype(np.uint16), 0x8FFF, 0x3000, 0x7E00),
    "float32": _Format(mx.float32, np.dtype(np.uint32), 0x81FFFFFF, 0x3E000000, 0x7FC00000),
}


class _Truth(NamedTuple):
    """In float64, of all rows or of chosen ones. `reach`: a row's |q| * scale * largest |k|."""

    out: Floats
    lse: Floats
    reach: Floats


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one `mla_decode` call, evaluated, and the shape they make."""

    shape: Shape
    q_nope: mx.array
    q_pe: mx.array | None
    cache: Cache
    scale: float
    _truths: dict[tuple[int, ...] | None, _Truth] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Check:
    """Whether a result is right: its largest row relative L2 error, and what is wrong with it."""

    ok: bool
    max_error: float
    reason: str


def make_case(
    shape: Shape,
    *,
    seed: int = 0,
    block_size: int = 32,
    starts: Sequence[int] | None = None,
    strided: bool = False,
    logit_scale: float = 1.0,
    poison: bool = True,
    distinct: int = 0,
) -> Case:
    """Random inputs for `shape`; equal seeds give equal numbers.

    block_size: of the paged layout; blocks lie in random order among unused ones.
    starts: left padding of each sequence, dense layout only; shape.all_lengths count from there.
    strided: dense layout: `[:, :, :T]` of a longer buffer, not contiguous where batch > 1.
    logit_scale: factor of the queries.
    poison: NaN in every unused slot, and wild ids in table entries past the end.
    distinct: paged layout only: about as many tokens differ, for the rest tables name the same
    blocks again and again. The truth of a long context is quick then. 0: all of them do.
    """
    rng = np.random.Generator(np.random.SFC64(seed))
    q_nope, q_pe = _queries(rng, shape, logit_scale)
    cache: Cache
    if shape.layout == "paged":
        cache = _paged(rng, shape, block_size, poison, distinct)
    else:
        cache = _dense(rng, shape, starts, strided, poison)
    return Case(shape, q_nope, q_pe, cache, SCALE)


def _queries(
    rng: np.random.Generator, shape: Shape, factor: float = 1.0
) -> tuple[mx.array, mx.array | None]:
    how = _FORMATS[shape.dtype]

    def make(width: int) -> mx.array:
        query = how.array(how.random(rng, (shape.batch, shape.heads, shape.q_len, width)))
        if factor != 1.0:
            query = (query.astype(mx.float32) * factor).astype(how.dtype)
            mx.eval(query)
        return query

    rank, rope = shape.geometry
    return make(rank), make(rope) if rope else None


def _paged(
    rng: np.random.Generator, shape: Shape, block_size: int, poison: bool, distinct: int
) -> PagedCache:
    how, lengths = _FORMATS[shape.dtype], shape.all_lengths
    counts = [-(-n // block_size) for n in lengths]
    most = max(2, distinct // (block_size * shape.batch)) if distinct else max(counts)
    owned = [min(count, most) for count in counts]
    spare = 2  # blocks that belong to nobody
    bits = how.random(rng, (sum(owned) + spare, block_size, shape.geometry.width))
    order = rng.permutation(len(bits)).astype(np.int32)
    table = np.full((shape.batch, max(counts) + 2), WILD_BLOCK if poison else 0, np.int32)
    at = spare
    for row, count, own, length in zip(table, counts, owned, lengths, strict=True):
        blocks = order[at : at + own]
        at += own
        if own < count:  # the last block, which may not be full, stays the only one
            blocks = np.append(rng.choice(blocks[:-1], count - 1), blocks[-1])
        row[:count] = blocks
        if poison and length % block_size:
            bits[row[count - 1], length % block_size :] = how.nan
    if poison:
        bits[order[:spare]] = how.nan
    return PagedCache(how.array(bits), mx.array(table), lengths)


def _dense(
    rng: np.random.Generator,
    shape: Shape,
    starts: Sequence[int] | None,
    strided: bool,
    poison: bool,
) -> DenseCache:
    how, (rank, rope) = _FORMATS[shape.dtype], shape.geometry
    first = tuple(starts) if starts is not None else (0,) * shape.batch
    lengths = tuple(a + n for a, n in zip(first, shape.all_lengths, strict=True))
    tokens = max(lengths)

    def make(width: int) -> mx.array:
        # mlx-lm grows its buffers by 256 tokens and hands out the filled part.
        bits = how.random(rng, (shape.batch, 1, tokens + 256 if strided else tokens, width))
        if poison:
            for row, start, length in zip(bits[:, 0], first, lengths, strict=True):
                row[:start] = row[length:] = how.nan
        array = how.array(bits)[:, :, :tokens]
        mx.eval(array)
        return array

    k_pe = make(rope) if rope else None
    return DenseCache(make(rank), k_pe, lengths, None if starts is None else first)


def reference(case: Case, rows: Sequence[int] | None = None) -> tuple[Floats, Floats]:
    """The truth in float64: output and LSE; computed once a case and row choice.

    rows: of the heads * q_len query rows, those to compute; without it all are.

    Returns `[batch, heads, q_len, kv_lora_rank]` and `[batch, heads, q_len]`, or with rows
    `[batch, rows, kv_lora_rank]` and `[batch, rows]`.
    """
    truth = _truth(case, rows)
    return truth.out, truth.lse


def _truth(case: Case, rows: Sequence[int] | None) -> _Truth:
    key = None if rows is None else tuple(rows)
    if key not in case._truths:
        case._truths[key] = _compute(case, key)
    return case._truths[key]


def _compute(case: Case, rows: tuple[int, ...] | None) -> _Truth:
    shape = case.shape
    parts = [case.q_nope] if case.q_pe is None else [case.q_nope, case.q_pe]
    query = np.concatenate([_floats(_bits(q)) for q in parts], axis=-1)
    query = query.reshape(shape.batch, shape.rows, -1)
    ahead = np.tile(np.arange(shape.q_len)[::-1], shape.heads)  # tokens that a row must not see
    if rows is not None:
        query, ahead = query[:, rows], ahead[list(rows)]
    query *= case.scale
    answers = [
        _sequence(query[b], ahead, _tokens(case, b), length, shape.geometry.kv_lora_rank)
        for b, length in enumerate(shape.all_lengths)
    ]
    out, lse, reach = (np.stack(x) for x in zip(*answers, strict=True))
    if rows is not None:
        return _Truth(out, lse, reach)
    batch, heads, q_len, rank = case.q_nope.shape
    all_rows = (batch, heads, q_len)
    return _Truth(out.reshape(*all_rows, rank), lse.reshape(all_rows), reach.reshape(all_rows))


def _bits(array: mx.array) -> Bits:
    """The array's memory, without a copy; bfloat16 as uint16, which numpy has no type for."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _floats(bits: Bits) -> Floats:
    if bits.dtype == np.uint16:
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)


class _Tokens(NamedTuple):
    """Some tokens of a sequence, `[tokens, width]`: how often each is there, and from where on;
    those that are there more than once are seen by every query.
    """

    latent: Floats
    times: Floats  # [tokens]
    start: int


def _tokens(case: Case, b: int) -> Iterator[_Tokens]:
    """The attended tokens of sequence b. Blocks named more than once come once: their order is
    nothing to a softmax. The last two, which queries may see in part, come as they lie.
    """
    cache = case.cache
    if isinstance(cache, PagedCache):
        latent, length = _bits(cache.latent), cache.lengths[b]
        block_size = latent.shape[1]
        blocks = np.asarray(cache.block_tables)[b, : -(-length // block_size)]
        body, tail = blocks[:-2], blocks[-2:]
        for first, (ids, times) in (
            (0, np.unique(body, return_counts=True)),
            (len(body), (tail, np.ones(len(tail)))),
        ):
            for at in range(0, len(ids), step := max(1, _CHUNK // block_size)):
                start = (first + at) * block_size
                chunk = latent[ids[at : at + step]].reshape(-1, latent.shape[2])[: length - start]
                often = np.repeat(times[at : at + step].astype(np.float64), block_size)
                yield _Tokens(_floats(chunk), often[: len(chunk)], start)
        return
    start = cache.starts[b] if cache.starts is not None else 0
    parts = [cache.latent] if cache.k_pe is None else [cache.latent, cache.k_pe]
    for at in range(start, cache.lengths[b], _CHUNK):
        end = min(at + _CHUNK, cache.lengths[b])
        chunk = np.concatenate([_floats(_bits(part)[b, 0, at:end]) for part in parts], axis=-1)
        yield _Tokens(chunk, np.ones(end - at), at - start)


def _sequence(
    query: Floats, ahead: NDArray[np.int_], tokens: Iterator[_Tokens], length: int, rank: int
) -> _Truth:
    """The truth `[rows, ...]` of one sequence, by chunks with a running maximum."""
    top = np.full((len(query), 1), -np.inf)
    total, out, longest = np.zeros_like(top), np.zeros((len(query), rank)), 0.0
    for chunk, times, at in tokens:
        scores = query @ chunk.T
        longest = max(longest, float(np.linalg.norm(chunk, axis=1).max()))
        hidden = np.arange(at, at + len(chunk)) >= (length - ahead)[:, None]
        scores[hidden] = -np.inf
        new_top = np.maximum(top, scores.max(axis=1, keepdims=True))
        base = np.where(np.isfinite(new_top), new_top, 0.0)
        weights, shrink = np.exp(scores - base) * times, np.exp(top - base)
        total = total * shrink + weights.sum(axis=1, keepdims=True)
        out = out * shrink + weights @ chunk[:, :rank]
        top = new_top
    with np.errstate(divide="ignore"):
        lse = np.where(np.isfinite(top), top, 0.0) + np.log(total)
    reach = np.linalg.norm(query, axis=1) * longest
    return _Truth(out / np.where(total == 0, 1.0, total), lse[:, 0], reach)


def check(
    case: Case, out: mx.array, lse: mx.array | None, plan: Plan, rows: Sequence[int] | None = None
) -> Check:
    """Compares a result with the truth; `rows` as in `reference`, to keep large shapes cheap.

    A plain MLX path is held to its own, looser, bounds.
    """
    want = _truth(case, rows)
    got = _picked(case, out, rows)
    if got.shape != want.out.shape:
        return Check(False, np.inf, f"output shape {got.shape} instead of {want.out.shape}")
    if not np.isfinite(got).all():
        return Check(False, np.inf, "output is not finite")
    norm = np.linalg.norm(want.out, axis=-1)
    error = np.linalg.norm(got - want.out, axis=-1) / np.where(norm == 0, 1.0, norm)
    bound = (TOLERANCE if plan.native else MLX_TOLERANCE)[case.shape.dtype]
    excess = np.maximum(0.0, want.reach - NORMAL_REACH)
    fault = _fault("row", error, bound + LARGE_SCORE_ROW_TOLERANCE * excess)
    if fault is None and lse is not None:
        fault = _lse_fault(_picked(case, lse, rows), want, plan)
    return Check(fault is None, float(error.max()), fault or "")


def _picked(case: Case, array: mx.array, rows: Sequence[int] | None) -> Floats:
    bits = _bits(array)
    if rows is not None:
        bits = bits.reshape(case.shape.batch, case.shape.rows, *bits.shape[3:])[:, list(rows)]
    return _floats(bits)


def _lse_fault(got: Floats, want: _Truth, plan: Plan) -> str | None:
    if got.shape != want.lse.shape:
        return f"LSE shape {got.shape} instead of {want.lse.shape}"
    empty = np.isneginf(want.lse)
    if not np.isneginf(got[empty]).all():
        return "LSE of a query without tokens is not -inf"
    bound = LSE_TOLERANCE if plan.native else MLX_LSE_TOLERANCE
    error = np.abs(got[~empty] - want.lse[~empty])
    excess = np.maximum(0.0, want.reach[~empty] - NORMAL_REACH)
    return _fault("LSE", error, bound + LARGE_SCORE_LSE_TOLERANCE * excess)


def _fault(what: str, error: Floats, bound: Floats) -> str | None:
    """The worst excess in words; NaN counts as one."""
    wrong = ~(error <= bound)
    if not wrong.any():
        return None
    worst = np.argmax(error / bound)
    return f"{what} error {error.flat[worst]:.2e} exceeds {bound.flat[worst]:.1e}"


class Pool:
    """One large piece of random cache from which cases are cut without copying.

    Successive cases of a ring read different memory, so a ring larger than the last-level cache
    times cold reads, as a model's many layers do.
    """

    def __init__(self, dtype: str, geometry: Geometry, nbytes: int, seed: int = 0) -> None:
        """Allocates about `nbytes` bytes at once; the values are random and none is NaN."""
        how, width = _FORMATS[dtype], geometry.width
        self.dtype, self.geometry, self.seed = dtype, geometry, seed
        # A multiple of 64 tokens serves every block size that is a power of two up to 64.
        unit = 64 * width * DTYPE_BYTES[dtype]
        self.tokens = max(1, nbytes // unit) * 64
        piece = min(self.tokens, max(1, _PIECE_BYTES // unit) * 64)
        rng = np.random.Generator(np.random.SFC64(seed))
        rows = how.array(how.random(rng, (piece, width)))
        pieces = [rows] * (self.tokens // piece) + [rows[: self.tokens % piece]]
        self._rows = mx.concatenate(pieces)  # [tokens, width], made by the device: see `_placed`
        mx.eval(self._rows)
        self._blocks: Bits = np.empty(0)

    def ring(self, shape: Shape, block_size: int = 32) -> int:
        """How many cases of that shape share no memory; 0 if the pool is too small for one."""
        return self.tokens // self._needed(shape, block_size)

    def case(self, shape: Shape, k: int, block_size: int = 32) -> Case:
        """The k-th case of the ring, evaluated.

        Raises:
            ValueError: the shape has another dtype or geometry, or needs more than the pool holds.
        """
        if (shape.dtype, shape.geometry) != (self.dtype, self.geometry):
            raise ValueError(
                f"[Pool.case] expected {self.dtype} {self.geometry}; "
                f"got {shape.dtype} {shape.geometry}"
            )
        ring = self.ring(shape, block_size)
        if not ring:
            raise ValueError(f"[Pool.case] expected at most {self.tokens} tokens; got {shape}")
        at = k % ring * self._needed(shape, block_size)
        q_nope, q_pe = _queries(np.random.Generator(np.random.SFC64([self.seed, k])), shape)
        cut = self._paged if shape.layout == "paged" else self._dense
        q_pe = None if q_pe is None else _placed(q_pe)
        return Case(shape, _placed(q_nope), q_pe, cut(shape, at, block_size), SCALE)

    def _needed(self, shape: Shape, block_size: int) -> int:
        """Tokens of memory that one case takes."""
        if shape.layout == "paged":
            return max(1, sum(-(-n // block_size) for n in shape.all_lengths)) * block_size
        # 8 tokens of any geometry are whole rows of both the latent and the rope view.
        return max(1, -(-shape.batch * shape.context // 8)) * 8

    def _paged(self, shape: Shape, at: int, block_size: int) -> PagedCache:
        blocks = self._rows.reshape(-1, block_size, self.geometry.width)
        counts = [-(-n // block_size) for n in shape.all_lengths]
        table = np.zeros((shape.batch, max(1, *counts)), np.int32)
        # Scattered over the whole pool, as in a server that has run for a while.
        order = self._order(blocks.shape[0])
        first = at // block_size
        for row, count in zip(table, counts, strict=True):
            row[:count] = order[first : first + count]
            first += count
        mx.eval(blocks)
        return PagedCache(blocks, _placed(mx.array(table)), shape.all_lengths)

    def _order(self, blocks: int) -> Bits:
        """Blocks at random; the same for every case."""
        if self._blocks.size != blocks:
            self._blocks = np.random.Generator(np.random.SFC64(self.seed)).permutation(blocks)
        return self._blocks

    def _dense(self, shape: Shape, at: int, block_size: int) -> DenseCache:
        rank, rope = self.geometry
        tokens = shape.batch * shape.context
        memory = self._rows[at : at + self._needed(shape, block_size)]

        def cut(width: int, skip: int) -> mx.array:
            array = memory.reshape(-1, width)[skip // width : skip // width + tokens]
            array = array.reshape(shape.batch, 1, shape.context, width)
            mx.eval(array)
            return array

        k_pe = cut(rope, tokens * rank) if rope else None
        return DenseCache(cut(rank, 0), k_pe, shape.all_lengths)


def _placed(array: mx.array) -> mx.array:
    """A copy that the device made. On a discrete GPU what the host makes lies in memory that both
    reach, and page by page it moves to where it is used: that would be timed.
    """
    copy = array * 1
    mx.eval(copy)
    return copy


def conformance_subset(backend: Backend) -> Iterator[tuple[str, Case, Plan]]:
    """Small cases that between them reach every kernel variant; with the plans to run them with.

    The fuller set is in tests/conformance. Back ends without native kernels get the MLX paths only.
    """
    for number, (shape, options) in enumerate(_subset()):
        case = make_case(shape, seed=number, **options)
        for plan in subset_plans(backend, shape, number):
            yield f"{shape} {options or ''}".strip(), case, plan


def subset_plans(backend: Backend, shape: Shape, number: int) -> list[Plan]:
    """The MLX paths and every tile of `shape`, with partition counts that alternate by `number`.

    Native plans that are refused here are among them: running one says why.
    """
    plans = [p for p in MLX_PLANS if number % 4 == 0 and backend.refusal(p, shape) is None]
    for i, tile in enumerate(backend.tiles(shape)):
        plans.append(Plan("single", 1, tile))
        plans.append(Plan("split", (2, 3, 5, 8, 32)[(number + i) % 5], tile))
    return plans


def _subset() -> Iterator[tuple[Shape, dict[str, Any]]]:
    lengths = (65, 0, 1, 300)
    for dtype in DTYPE_BYTES:
        for geometry in GEOMETRIES:
            yield Shape(300, 4, 5, dtype, geometry, 2, "paged", lengths), {"block_size": 16}
        yield Shape(300, 4, 20, dtype, GEOMETRIES[0], 3, "dense", lengths), {"strided": True}
        yield Shape(1000, 1, 128, dtype), {}
        yield Shape(2049, 1, 16, dtype), {"block_size": 64, "logit_scale": 30.0}
        yield Shape(100, 2, 1, dtype, layout="dense"), {"starts": (3, 64)}
    # A GPU has a kernel for few rows, other tiles for more, and a text a geometry and layout.
    for dtype in DTYPE_BYTES:
        for heads in (2, 4, 20):
            yield Shape(100, 2, heads, dtype), {}
        for geometry in GEOMETRIES:
            yield Shape(130, 2, 4, dtype, geometry, 1, "dense"), {"strided": True}
            yield Shape(300, 4, 24, dtype, geometry, 1, "dense", lengths), {"strided": True}
            yield Shape(130, 1, 4, dtype, geometry), {}
        yield Shape(200, 9, 6, dtype, GEOMETRIES[0], 8), {"block_size": 24}
