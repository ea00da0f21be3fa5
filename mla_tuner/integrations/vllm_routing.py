"""From a forward of vllm-metal to a plan for all its layers, or to the reason why there is none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from ..caches import PagedCache
from ..ops import mla_decode
from ..plan import MLX
from ..shapes import MAX_BATCH, MAX_CONTEXT, Geometry
from .counts import Stats
from .routing import FAILED, Problem, Router, Step
from .spans import UNKNOWN, Span

if TYPE_CHECKING:
    from ..policy import Policy

log = logging.getLogger("mla_tuner")


class Forward(NamedTuple):
    """A forward's decision, and its block tables on the device: made once for all layers.

    tables: `[rows, max_blocks]` int32; `rows` are the query tokens, each a sequence of its own.
    """

    step: Step
    tables: mx.array


class PagedRouter(Router):
    """Routes the layers of vllm-metal's forwards. Its `wrapper` is a MLAPagedAttentionWrapper,
    `inner` the attention module in it, `cache` the MLAPagedLatentCache, and `context` the forward's
    PagedAttentionContext.
    """

    layout = "paged"

    def __init__(self, policy: Policy | None = None, force: bool = False) -> None:
        super().__init__(policy, force, FAILED)
        self.stats = Stats(engine="vllm-metal")

    def renewed(self, policy: Policy) -> PagedRouter:
        """With another policy; what was counted stays known."""
        router = PagedRouter(policy, self.force)
        router.stats = self.stats
        return router

    def admits(self, wrapper: Any, inner: Any, cache: Any, context: Any) -> bool:
        """Whether a layer is to run through `attend`; if not, that is counted. Never raises."""
        forward = self.forward(wrapper, inner, cache, context)
        if isinstance(forward, Forward):
            return True
        self.stats.count_stock(forward)
        return False

    def forward(self, wrapper: Any, inner: Any, cache: Any, context: Any) -> Forward | str:
        """What the layers of a forward share, or why they run vllm-metal's own code.

        Kept in the context's own memo, which lives as long as the forward. Never raises.
        """
        try:
            memo, key = context.kernel_metadata_cache, _key(inner, cache)
            if key not in memo:
                memo[key] = self._decided(wrapper, inner, cache, context)
            return cast("Forward | str", memo[key])
        except Exception as error:  # a release of vllm-metal that we don't know
            log.debug("a forward was not routed: %s", error)
            return f"{type(error).__name__} in routing"

    def attend(
        self,
        forward: Forward,
        inner: Any,
        cache: Any,
        layer: int,
        queries: tuple[mx.array, mx.array],
        context: Any,
        scale: float,
    ) -> mx.array:
        """The heads' outputs in latent space, `[rows, heads, 1, kv_lora_rank]`.

        queries: `[rows, heads, 1, kv_lora_rank]` and `[rows, heads, 1, rope_dim]` in the cache's
        dtype. A plan that raises is not used again; the layer is redone on `mlx`.
        """
        step = forward.step
        paged = PagedCache(cache.latent_caches[layer], forward.tables, step.problem.span.lengths)
        policy = cast("Policy", step)
        out = self.attempt(step, lambda: mla_decode(*queries, paged, scale=scale, policy=policy))
        if out is not None:
            return out
        context.kernel_metadata_cache[_key(inner, cache)] = step.stock
        return mla_decode(*queries, paged, scale=scale, plan=MLX)

    def _decided(self, wrapper: Any, inner: Any, cache: Any, context: Any) -> Forward | str:
        if not wrapper._is_absorbed:
            return "an attention that is not absorbed"
        if inner.training:
            return "training mode"
        tables, lengths = context.block_tables, tuple(context.context_lens)
        rows, block = len(lengths), cache.block_size
        if list(context.cu_seqlens) != list(range(rows + 1)):
            return "a prefill in the batch"
        if set(map(type, lengths)) != {int}:
            return UNKNOWN
        if not 0 < min(lengths) <= max(lengths) <= MAX_CONTEXT or rows > MAX_BATCH:
            return "more rows or tokens than a call may have"
        if block % 8:
            return f"blocks of {block} tokens"
        if [len(table) * block >= n for table, n in zip(tables, lengths, strict=True)].count(False):
            return "a block table that is too short"
        geometry = Geometry(inner.kv_lora_rank, inner.qk_rope_head_dim)
        if cache.latent_dim != geometry.width:
            return f"a cache of width {cache.latent_dim}"
        step = self._look_up(Problem(Span(lengths), 1, inner.num_heads, cache.dtype, geometry))
        return step.stock or Forward(step, padded(tables))


def padded(tables: list[list[int]]) -> mx.array:
    """Block tables as `[rows, max_blocks]` int32; what is filled in is never read."""
    width = max(map(len, tables))
    return mx.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=mx.int32)


def _key(inner: Any, cache: Any) -> tuple[object, ...]:
    """Layers that differ in one of these have a decision of their own."""
    widths = inner.num_heads, inner.kv_lora_rank, inner.qk_rope_head_dim
    return "mla_tuner", cache.block_size, cache.dtype, *widths
