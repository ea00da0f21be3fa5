"""vllm-metal's paged MLA operation, by our kernels: the same arguments, limits and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from ..caches import PagedCache
from ..ops import mla_decode
from ..plan import Plan
from ..shapes import DEEPSEEK

if TYPE_CHECKING:
    from ..policy import Policy

BLOCK_SIZES = (16, 32)
HEADS_PER_TG = (1, 2)


def metal_mla_paged_attention(
    q_nope: mx.array,
    q_pe: mx.array,
    latent_cache: mx.array,
    block_tables: mx.array,
    context_lens: mx.array | Sequence[int],
    cu_seqlens_q: mx.array,
    scale: float,
    heads_per_tg: int = 1,
    *,
    plan: Plan | None = None,
    policy: Policy | None = None,
) -> mx.array:
    """Attention of one new token a row over a paged latent cache, in latent space.

    q_nope: `[rows, heads, 512]`, float16 or bfloat16. q_pe: `[rows, heads, 64]`, same dtype.
    latent_cache: `[blocks, 16 or 32, 576]`, same dtype. block_tables: `[rows, max_blocks]` int32.
    context_lens: `[rows]`, the new token included; host ints keep the call lazy, an array is waited
    for. cu_seqlens_q: not read, since each row is a sequence of one token. heads_per_tg: 1 or 2, a
    divisor of `heads`; a plan's tile decides that here. plan, policy: as `mla_decode` takes them.

    Returns `[rows, heads, 512]` in q's dtype.

    Raises:
        RuntimeError: what vllm-metal's operation raises for, though at once, not when evaluated.
        ValueError: widths that don't add up, and what else `mla_decode` refuses.
    """
    _check(q_nope, q_pe, latent_cache, heads_per_tg)
    lengths: Any = context_lens.tolist() if isinstance(context_lens, mx.array) else context_lens
    cache = PagedCache(latent_cache, block_tables.astype(mx.int32), lengths)
    queries = q_nope[:, :, None], q_pe[:, :, None]  # [rows, heads, 1, width]
    return mla_decode(*queries, cache, scale=scale, plan=plan, policy=policy)[:, :, 0]


def _check(q_nope: mx.array, q_pe: mx.array, latent: mx.array, heads_per_tg: int) -> None:
    _, heads, rank = q_nope.shape
    rope, (_, block_size, width) = q_pe.shape[2], latent.shape
    if rank + rope != width:
        raise ValueError(
            f"[metal_mla_paged_attention] expected latent_cache of width {rank} + {rope}; "
            f"got {width}"
        )
    if (rank, rope) != DEEPSEEK:
        _refuse("kv_lora_rank=512 and qk_rope_head_dim=64", f"{rank} and {rope}")
    if block_size not in BLOCK_SIZES:
        _refuse("block_size in {16, 32}", block_size)
    if heads_per_tg not in HEADS_PER_TG:
        _refuse("heads_per_tg: heads_per_tg must be in {1, 2}", heads_per_tg)
    if heads % heads_per_tg:
        _refuse(f"heads divisible by heads_per_tg={heads_per_tg}", heads)
    dtypes = q_nope.dtype, q_pe.dtype, latent.dtype
    if len(set(dtypes)) > 1:
        _refuse("q_nope, q_pe and latent_cache, which must share the same dtype", dtypes)
    if q_nope.dtype not in (mx.float16, mx.bfloat16):
        _refuse("float16 or bfloat16", q_nope.dtype)


def _refuse(what: str, got: object) -> NoReturn:
    raise RuntimeError(f"[metal_mla_paged_attention] expected {what}; got {got}")
