"""The paths in plain MLX: what engines do today (`mlx`), and rows of one matmul (`mlx_rows`).

Sequences of equal extent run as one batch. Others run one by one, as vllm-metal does: no masks, no
padded work, and nothing outside [start, length) is touched, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..caches import DenseCache, PagedCache
from ..plan import Plan
from ..shapes import Shape
from . import Call


class Tokens(NamedTuple):
    """Cached tokens of a few sequences of equal extent, and the queries that see at least one."""

    q_nope: mx.array  # [b, heads, q, rank]
    q_pe: mx.array | None  # [b, heads, q, rope]
    latent: mx.array  # [b, 1, tokens, rank]
    k_pe: mx.array | None  # [b, 1, tokens, rope]
    mask: mx.array | None  # [q, tokens], True where query j sees the token; None: all see all


Attention = Callable[[Tokens, float], mx.array]


def run_mlx(call: Call) -> tuple[mx.array, mx.array | None]:
    """What mlx-lm and vllm-metal do: MLX's attention on the latent, rope scores as its mask."""
    return _run(call, _mlx)


def run_mlx_fused(call: Call) -> tuple[mx.array, mx.array | None]:
    """As `mlx`, with MLX's fused kernel where its own rule would not take it.

    Raises:
        ValueError: MLX has none for such a call.
    """
    return _run(call, partial(_mlx, force_fused=True))


def run_mlx_rows(call: Call) -> tuple[mx.array, mx.array | None]:
    """The same maths with heads and queries as rows of one matmul, so the latent is read once."""
    return _run(call, _mlx_rows)


def _mlx(t: Tokens, scale: float, **options: Any) -> mx.array:
    mask = t.mask
    if t.q_pe is not None and t.k_pe is not None:
        scores = (t.q_pe * scale) @ t.k_pe.swapaxes(-1, -2)
        mask = scores if mask is None else mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    return mx.fast.scaled_dot_product_attention(
        t.q_nope, t.latent, t.latent, scale=scale, mask=mask, **options
    )


def _mlx_rows(t: Tokens, scale: float) -> mx.array:
    weights = mx.softmax(_scores(t, scale), axis=-1, precise=True)
    batch, heads, q_len, rank = t.q_nope.shape
    folded = weights.reshape(batch, 1, heads * q_len, -1) @ t.latent
    return folded.reshape(batch, heads, q_len, rank)


def _scores(t: Tokens, scale: float) -> mx.array:
    """Scores `[b, heads, q, tokens]` in the arrays' dtype, -inf where the query sees nothing."""
    batch, heads, q_len, _ = t.q_nope.shape

    def product(q: mx.array, k: mx.array) -> mx.array:
        return (q * scale).reshape(batch, 1, heads * q_len, -1) @ k.swapaxes(-1, -2)

    scores = product(t.q_nope, t.latent)
    if t.q_pe is not None and t.k_pe is not None:
        scores = scores + product(t.q_pe, t.k_pe)
    scores = scores.reshape(batch, heads, q_len, -1)
    return scores if t.mask is None else mx.where(t.mask, scores, mx.array(-mx.inf, scores.dtype))


def _log_sum_exp(t: Tokens, scale: float) -> mx.array:
    """LSE `[b, heads, q]` from float32 scores: rounded to bfloat16 they would be off by units."""

    def wide(x: mx.array | None) -> mx.array | None:
        return None if x is None else x.astype(mx.float32)

    exact = t._replace(
        q_nope=t.q_nope.astype(mx.float32),
        q_pe=wide(t.q_pe),
        latent=t.latent.astype(mx.float32),
        k_pe=wide(t.k_pe),
    )
    return mx.logsumexp(_scores(exact, scale), axis=-1)


def _run(call: Call, attention: Attention) -> tuple[mx.array, mx.array | None]:
    extents = list(zip(call.starts, call.lengths, strict=True))
    if len(set(extents)) == 1:
        return _sequences(call, slice(None), *extents[0], attention)
    parts = [
        _sequences(call, slice(b, b + 1), start, length, attention)
        for b, (start, length) in enumerate(extents)
    ]
    out = mx.concatenate([out for out, _ in parts])
    return out, mx.concatenate(
        [lse for _, lse in parts if lse is not None]
    ) if call.want_lse else None


def _sequences(
    call: Call, which: slice, start: int, length: int, attention: Attention
) -> tuple[mx.array, mx.array | None]:
    """Some sequences of the batch, all with tokens [start, length)."""
    q_nope = call.q_nope[which]
    q_pe = None if call.q_pe is None else call.q_pe[which]
    batch, heads, q_len, rank = q_nope.shape
    blind = min(q_len, max(0, q_len - (length - start)))  # leading queries that see no token
    out = mx.zeros((batch, heads, blind, rank), q_nope.dtype)
    lse = mx.full((batch, heads, blind), -mx.inf, mx.float32) if call.want_lse else None
    if blind == q_len:
        return out, lse
    if blind:
        q_nope, q_pe = q_nope[:, :, blind:], None if q_pe is None else q_pe[:, :, blind:]
    if isinstance(call.cache, PagedCache):
        latent, k_pe, known = _paged(call, call.cache, which, length)
        q_nope = mx.where(known, q_nope, mx.array(mx.nan, q_nope.dtype))
    else:
        latent, k_pe = _dense(call, call.cache, which, start, length)
    tokens = Tokens(q_nope, q_pe, latent, k_pe, _causal(q_len - blind, length - start))
    seen = attention(tokens, call.scale)
    out = mx.concatenate([out, seen], axis=2) if blind else seen
    if lse is not None:
        lse = mx.concatenate([lse, _log_sum_exp(tokens, call.scale)], axis=2)
    return out, lse


def _dense(
    call: Call, cache: DenseCache, which: slice, start: int, length: int
) -> tuple[mx.array, mx.array | None]:
    """Tokens [start, length): latent `[b, 1, tokens, rank]`, rope keys `[b, 1, tokens, rope]`."""
    latent = cache.latent[which, :, start:length]
    if cache.k_pe is None or call.q_pe is None:
        return latent, None
    return latent, cache.k_pe[which, :, start:length]


def _paged(
    call: Call, cache: PagedCache, which: slice, length: int
) -> tuple[mx.array, mx.array | None, mx.array]:
    """The same of tokens [0, length), and `[b, 1, 1, 1]`: False where a block id is out of range.

    The ids are known to the device alone. A gather would follow them anywhere in memory.
    """
    blocks, block_size, _ = cache.latent.shape
    # Unsigned, so that a negative id is too large as well.
    ids = cache.block_tables[which, : -(-length // block_size)].view(mx.uint32)
    safe = mx.minimum(ids, blocks - 1)
    known = (ids == safe).all(axis=1)[:, None, None, None]
    gathered = cache.latent[safe]
    tokens = gathered.reshape(gathered.shape[0], 1, -1, gathered.shape[-1])[:, :, :length]
    rank = call.shape.geometry.kv_lora_rank
    return tokens[..., :rank], tokens[..., rank:] if call.q_pe is not None else None, known


def _causal(q_len: int, tokens: int) -> mx.array | None:
    """`[q_len, tokens]`: query j sees all tokens but the last q_len - 1 - j."""
    if q_len == 1:
        return None
    seen = mx.arange(tokens - q_len + 1, tokens + 1)[:, None]
    return mx.arange(tokens)[None] < seen


class MlxBackend:
    """A device without kernels of our own: `mlx` and `mlx_rows` run, native plans are refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._unfused: dict[tuple[object, ...], str | None] = {}

    def digest(self) -> str:
        return ""

    def available(self) -> tuple[bool, str]:
        return False, f"no native kernel for {self.name} is built in"

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return ()

    def signature(self, *arrays: mx.array | None) -> Hashable:
        if not all(isinstance(a, mx.array) or a is None for a in arrays):
            raise TypeError("[signature] expected arrays or None")
        return tuple([a if a is None else (a.shape, a.dtype) for a in arrays])

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        if plan.native:
            return self.available()[1]
        return self._fused_refusal(shape) if plan.path == "mlx_fused" else None

    def proof(self, plan: Plan, shape: Shape) -> tuple[bool, str]:
        reason = self.refusal(plan, shape)
        return reason is None, reason or f"{plan} can run here"

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        return _RUN[plan.path](call)

    def executed(self, ticket: int) -> Plan | None:
        return None

    def detail(self, ticket: int) -> dict[str, object]:
        return {}

    def compiled(self) -> Sequence[tuple[str, float]]:
        return ()

    def self_check(self) -> tuple[bool, str]:
        return self.available()

    def _fused_refusal(self, shape: Shape) -> str | None:
        """What MLX says of a few tokens of such a shape; asked once, never raises."""
        key = shape.heads, shape.q_len, shape.dtype, shape.geometry
        if key not in self._unfused:
            self._unfused[key] = _fused_fault(shape)
        return self._unfused[key]


_RUN = {"mlx": run_mlx, "mlx_fused": run_mlx_fused, "mlx_rows": run_mlx_rows}


def _fused_fault(shape: Shape) -> str | None:
    dtype, (rank, rope), tokens = getattr(mx, shape.dtype), shape.geometry, 64

    def zeros(*lead: int, width: int) -> mx.array | None:
        return mx.zeros((*lead, width), dtype) if width else None

    query, latent = (
        mx.zeros((1, shape.heads, shape.q_len, rank), dtype),
        mx.zeros((1, 1, tokens, rank), dtype),
    )
    beside = zeros(1, shape.heads, shape.q_len, width=rope), zeros(1, 1, tokens, width=rope)
    try:
        tiny = Tokens(query, beside[0], latent, beside[1], _causal(shape.q_len, tokens))
        mx.eval(_mlx(tiny, 1.0, force_fused=True))
    except Exception as error:  # an older MLX knows no such argument
        return f"MLX's fused attention does not take it: {' '.join(str(error).split())[:300]}"
    return None
