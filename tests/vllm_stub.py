"""As much of vllm-metal as its MLA decode needs, written anew: it can't be installed everywhere.

The names, arguments and attributes are vllm-metal's, and so is the order of the calls.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

envs = SimpleNamespace(VLLM_METAL_MLA_KERNEL=False)
_local = threading.local()


@dataclass
class PagedAttentionContext:
    """One forward: each sequence's blocks and length, and where its new tokens are written."""

    slot_mapping: list[int]
    block_tables: list[list[int]]
    context_lens: list[int]
    offsets: list[int]
    cu_seqlens: list[int]
    kernel_metadata_cache: dict[Any, Any] = field(default_factory=dict)


def set_context(context: PagedAttentionContext | None) -> None:
    _local.context = context


class MLAPagedLatentCache:
    """A list of `[num_blocks, block_size, latent_dim]`, one a layer."""

    def __init__(
        self, num_layers: int, latent_dim: int, num_blocks: int, block_size: int, dtype: mx.Dtype
    ) -> None:
        self.latent_dim, self.num_blocks, self.block_size = latent_dim, num_blocks, block_size
        self.dtype = dtype
        shape = num_blocks, block_size, latent_dim
        self.latent_caches = [mx.zeros(shape, dtype) for _ in range(num_layers)]


class MLAPagedAttentionWrapper(nn.Module):
    """Writes the new tokens' latents, then attends: by a kernel if admitted, else row by row."""

    def __init__(self, inner: Any, layer_idx: int, latent_cache: MLAPagedLatentCache) -> None:
        super().__init__()
        self._inner, self._mla_layer_idx = inner, layer_idx
        self._mla_latent_cache = latent_cache
        self._is_absorbed = hasattr(inner, "embed_q")

    def _attention_scale(self) -> float:
        return float(self._inner.scale)

    def _can_use_kernel(self, inner: Any, latent_cache: Any, ctx: Any) -> bool:
        return envs.VLLM_METAL_MLA_KERNEL

    def _kernel_fast_path_single_pass(
        self,
        inner: Any,
        latent_cache: Any,
        layer_idx: int,
        q_nope: mx.array,
        q_pe: mx.array,
        ctx: Any,
        seq_len: int,
    ) -> mx.array:
        raise RuntimeError("the engine's own kernel is on Apple GPUs alone")

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        inner, ctx, latent = self._inner, _local.context, self._mla_latent_cache
        layer, rows = self._mla_layer_idx, x.shape[1]
        q = inner.q_b_proj(inner.q_a_layernorm(inner.q_a_proj(x)))
        q = q.reshape(1, rows, inner.num_heads, inner.q_head_dim).swapaxes(1, 2)
        q_nope, q_pe = mx.split(q, [inner.qk_nope_head_dim], axis=-1)
        low, k_pe = mx.split(inner.kv_a_proj_with_mqa(x), [inner.kv_lora_rank], axis=-1)
        q_pe, k_pe = self._rope(q_pe, ctx), self._rope(k_pe[:, None], ctx)[:, 0]
        new = mx.concatenate([inner.kv_a_layernorm(low), k_pe], axis=-1)[0].astype(latent.dtype)
        flat = latent.latent_caches[layer].reshape(-1, latent.latent_dim)
        flat[mx.array(ctx.slot_mapping)] = new
        latent.latent_caches[layer] = flat.reshape(latent.num_blocks, latent.block_size, -1)
        if self._can_use_kernel(inner, latent, ctx):
            out = self._kernel_fast_path_single_pass(inner, latent, layer, q_nope, q_pe, ctx, rows)
        else:
            out = mx.concatenate([self._row(q_nope, q_pe, ctx, i) for i in range(rows)], axis=1)
        return inner.o_proj(out)

    def _rope(self, x: mx.array, ctx: Any) -> mx.array:
        parts = []
        for start, end, offset in zip(
            ctx.cu_seqlens, ctx.cu_seqlens[1:], ctx.offsets, strict=False
        ):
            parts.append(self._inner.rope(x[:, :, start:end], offset=offset))
        return mx.concatenate(parts, axis=2)

    def _row(self, q_nope: mx.array, q_pe: mx.array, ctx: Any, row: int) -> mx.array:
        """One new token's output, `[1, 1, heads * v_head_dim]`."""
        inner, latent = self._inner, self._mla_latent_cache
        sequence = max(i for i, start in enumerate(ctx.cu_seqlens[:-1]) if start <= row)
        end = ctx.context_lens[sequence] - (ctx.cu_seqlens[sequence + 1] - 1 - row)
        blocks = mx.array(ctx.block_tables[sequence])
        tokens = latent.latent_caches[self._mla_layer_idx][blocks].reshape(-1, latent.latent_dim)
        kv, k_pe = mx.split(tokens[:end], [inner.kv_lora_rank], axis=-1)
        at = slice(row, row + 1)
        scores = (q_pe[:, :, at] * inner.scale) @ k_pe.T
        out = mx.fast.scaled_dot_product_attention(
            *(inner.embed_q(q_nope[:, :, at]), kv[None, None], kv[None, None]),
            scale=inner.scale,
            mask=scores,
        )
        return inner.unembed_out(out).swapaxes(1, 2).flatten(2)
