"""An MLA attention module as engines run it, from synthetic weights: one decode step a call.

Everything between a layer's input and its output is in it: the norm, projections of query and
cache entry, rope, the write into the cache, block tables where it is paged, attention, and the
projections of its output.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .caches import Cache, DenseCache, PagedCache
from .ops import mla_decode
from .plan import Plan
from .shapes import DTYPE_BYTES, Shape
from .wrapper_bench_widths import Widths

BLOCK = 32  # tokens of a block of the paged layout
GROWTH = 256  # tokens by which mlx-lm grows its dense buffers
_EPS = 1e-6
_ROPE_BASE = 10000.0


class Weights(NamedTuple):
    """Of one module, `[out, in]` each; the last two of the heads `[heads, out, in]`.

    q_a: None where the query is one projection, q_b.
    """

    q_a: mx.array | None
    q_b: mx.array
    kv_a: mx.array
    out: mx.array
    embed_q: mx.array
    unembed_out: mx.array


class Inputs(NamedTuple):
    """Of a module's attention: `mla_decode`'s first three arguments."""

    q_nope: mx.array
    q_pe: mx.array | None
    cache: Cache


def weight_shapes(widths: Widths, shape: Shape) -> list[tuple[int, ...] | None]:
    """In the order of `Weights`."""
    _, hidden, low, nope, v_dim = widths
    heads, (rank, rope) = shape.heads, shape.geometry
    return [
        (low, hidden) if low else None,
        (heads * (nope + rope), low or hidden),
        (rank + rope, hidden),
        (hidden, heads * v_dim),
        (heads, rank, nope),
        (heads, v_dim, rank),
    ]


def weight_numbers(widths: Widths, shape: Shape) -> int:
    """How many weights a module has: half the operations that a token takes outside attention."""
    total = 0
    for dims in filter(None, weight_shapes(widths, shape)):
        count = 1
        for each in dims:
            count *= each
        total += count
    return total


def flop(widths: Widths, shape: Shape) -> int:
    """Operations of one step of the whole module."""
    return shape.flop + 2 * weight_numbers(widths, shape) * shape.batch * shape.q_len


def make_weights(widths: Widths, shape: Shape, seed: int = 0) -> Weights:
    """Uniform and scaled so that projections keep the size of their input; evaluated."""
    dtype, keys = getattr(mx, shape.dtype), iter(mx.random.split(mx.random.key(seed), 6))
    made: list[mx.array | None] = []
    for dims in weight_shapes(widths, shape):
        reach = (3.0 / dims[-1]) ** 0.5 if dims else 0.0
        key = next(keys)
        made.append(mx.random.uniform(-reach, reach, dims, dtype, key) if dims else None)
    mx.eval(*filter(lambda each: each is not None, made))
    return Weights(*made)  # type: ignore[arg-type]


def copied(weights: Weights) -> Weights:
    """The same numbers in memory of their own, as another layer's are."""
    made = [None if each is None else each * 1 for each in weights]
    mx.eval(*filter(lambda each: each is not None, made))
    return Weights(*made)  # type: ignore[arg-type]


class PagedState:
    """A cache in blocks that lie in random order, and what an engine's scheduler says of it.

    Nothing but this object holds the cache between two steps: a write then needs no copy of it.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        blocks, q_len = -(-shape.context // BLOCK), shape.q_len
        total, key = blocks * shape.batch, mx.random.key(seed)
        order: list[int] = mx.random.permutation(total, key=key).tolist()  # type: ignore[assignment]
        self._tables = [order[at : at + blocks] for at in range(0, total, blocks)]
        new = range(shape.context - q_len, shape.context)
        self._slots = [
            table[at // BLOCK] * BLOCK + at % BLOCK for table in self._tables for at in new
        ]
        self._lengths = shape.all_lengths
        self.latent = _random((total, BLOCK, shape.geometry.width), shape.dtype, key)
        mx.eval(self.latent)

    def write(self, latent: mx.array, k_pe: mx.array) -> Cache:
        """The cache with the newest tokens' entries `[batch, 1, q_len, width]` in it."""
        shape = self.latent.shape
        flat = self.latent.reshape(-1, shape[-1])
        entries = mx.concatenate([latent, k_pe], axis=-1).reshape(-1, shape[-1])
        flat[mx.array(self._slots)] = entries
        self.latent = flat.reshape(shape)
        return PagedCache(self.latent, mx.array(self._tables, mx.int32), self._lengths)


class DenseState:
    """Two buffers with room to grow, of which the filled part is read. Held as `PagedState` is."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        rank, rope = shape.geometry
        rows = shape.batch, 1, (shape.context // GROWTH + 1) * GROWTH
        self._end, self._q_len, self._lengths = shape.context, shape.q_len, shape.all_lengths
        keys = mx.random.split(mx.random.key(seed))
        self.latent = _random((*rows, rank), shape.dtype, keys[0])
        self.k_pe = _random((*rows, rope), shape.dtype, keys[1]) if rope else None
        mx.eval(self.latent, *([] if self.k_pe is None else [self.k_pe]))

    def write(self, latent: mx.array, k_pe: mx.array) -> Cache:
        """As `PagedState.write`."""
        start, end = self._end - self._q_len, self._end
        self.latent[:, :, start:end] = latent
        if self.k_pe is not None:
            self.k_pe[:, :, start:end] = k_pe
        seen = None if self.k_pe is None else self.k_pe[:, :, :end]
        return DenseCache(self.latent[:, :, :end], seen, self._lengths)


State = PagedState | DenseState


def make_state(shape: Shape, seed: int = 0) -> State:
    """A full cache of the shape's layout; random numbers."""
    return PagedState(shape, seed) if shape.layout == "paged" else DenseState(shape, seed)


def state_bytes(shape: Shape) -> int:
    """About what `make_state` takes."""
    tokens = shape.batch * (shape.context + GROWTH)
    return tokens * shape.geometry.width * DTYPE_BYTES[shape.dtype]


class Module:
    """One layer's attention at the end of a context: every call writes the same tokens anew."""

    def __init__(self, widths: Widths, shape: Shape, weights: Weights, state: State) -> None:
        self.shape, self.state = shape, state
        self._widths, self._weights = widths, weights
        self.scale = (widths.qk_nope_head_dim + shape.geometry.rope_dim) ** -0.5

    def __call__(self, x: mx.array, plan: Plan) -> mx.array:
        """x: `[batch, q_len, hidden_size]`, as is what it returns; lazy."""
        q_nope, q_pe, cache = self.inputs(x)
        return self.output(mla_decode(q_nope, q_pe, cache, scale=self.scale, plan=plan))

    def inputs(self, x: mx.array) -> Inputs:
        """What attention gets; the new tokens are in the cache by then."""
        w, (rank, rope) = self._weights, self.shape.geometry
        x = _norm(x)
        low = x if w.q_a is None else _norm(x @ w.q_a.T)
        q = mx.unflatten(low @ w.q_b.T, -1, (self.shape.heads, -1)).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self._widths.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split((x @ w.kv_a.T)[:, None], [rank], axis=-1)
        if rope:
            q_pe, k_pe = self._rotated(q_pe), self._rotated(k_pe)
        cache = self.state.write(_norm(latent), k_pe)
        return Inputs(q_nope @ w.embed_q.swapaxes(-1, -2), q_pe if rope else None, cache)

    def output(self, attended: mx.array) -> mx.array:
        """From the heads' answers in latent space to the module's."""
        w = self._weights
        heads = (attended @ w.unembed_out.swapaxes(-1, -2)).transpose(0, 2, 1, 3)
        return heads.flatten(-2) @ w.out.T

    def _rotated(self, x: mx.array) -> mx.array:
        offset, rope = self.shape.context - self.shape.q_len, self.shape.geometry.rope_dim
        return mx.fast.rope(x, rope, traditional=True, base=_ROPE_BASE, scale=1.0, offset=offset)


def _norm(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, None, _EPS)


def _random(dims: tuple[int, ...], dtype: str, key: mx.array) -> mx.array:
    return mx.random.uniform(-1.7, 1.7, dims, getattr(mx, dtype), key)
