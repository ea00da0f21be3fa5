"""mlx-lm's MLA attention classes: how each makes queries, cache entries and its output."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import TunerError

# Both parts of the query, then what the cache holds of both; the output is that of the heads,
# [batch, heads, q_len, v_head_dim].
Attend = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]
# From a module, its input and its heads' outputs [batch, q_len, heads, v_head_dim] to its output.
Finish = Callable[[Any, mx.array, mx.array], Any]


def _o_proj(module: Any, x: mx.array, out: mx.array) -> Any:
    return module.o_proj(out.flatten(-2))


def _dense(module: Any, x: mx.array, out: mx.array) -> Any:
    return module.dense(out.flatten(-2))


def _gated(module: Any, x: mx.array, out: mx.array) -> Any:
    out = out.flatten(-2)
    return module.o_proj(out * mx.sigmoid(module.g_proj(x)) if module.use_gate else out)


def _gated_heads(module: Any, x: mx.array, out: mx.array) -> Any:
    """One gate a head, in float32."""
    gate = mx.sigmoid(module.g_proj(x).astype(mx.float32)).astype(out.dtype)
    return module.dense((out * gate[..., None]).flatten(-2))


@dataclass(frozen=True)
class MlaClass:
    """What sets one attention class apart from the others.

    fingerprint: `fingerprint` of the `__call__` that this description was written for.
    heads, scale: the attributes that count heads on this device and scale scores. rope: whether
    queries and keys are rotated. lora_scales: `mla_scale_q_lora` and `mla_scale_kv_lora` apply.
    query_scale: the call takes a scale of the whole query after `x`. indexed: `cache` is a pair,
    and `indexer` fills the second; up to its `index_topk` tokens the attention is dense. absorbed:
    by `absorb`, while stock caches keys and values of every head. finish: what comes after the
    heads.
    """

    module: str
    name: str
    fingerprint: str
    heads: str = "num_heads"
    scale: str = "scale"
    rope: bool = True
    lora_scales: bool = False
    query_scale: bool = False
    indexed: bool = False
    absorbed: bool = False
    finish: Finish = _o_proj


CLASSES = (
    MlaClass("deepseek_v3", "DeepseekV3Attention", "519ce78796e26515"),
    MlaClass("deepseek_v32", "DeepseekV32Attention", "da068624fcf2af61", indexed=True),
    MlaClass("glm4_moe_lite", "Glm4MoeLiteAttention", "519ce78796e26515"),
    MlaClass("kimi_linear", "KimiMLAAttention", "1a414ce024ec64fe", rope=False),
    MlaClass("kimi_k3", "KimiK3MLAAttention", "aa5e20dc41080208", rope=False, finish=_gated),
    MlaClass(
        *("longcat_flash", "LongcatFlashMLA", "1a465a16a07b0c46"),
        heads="num_attention_heads",
        lora_scales=True,
    ),
    MlaClass("bailing_hybrid", "MultiLatentAttention", "b0cbc72c11aa0571", finish=_dense),
    MlaClass("bailing_moe_v3", "BailingMLA", "39f4af1849d435f5", finish=_gated_heads),
    MlaClass("mistral4", "Mistral4Attention", "2d8158975ae1400f", query_scale=True),
)


UNKNOWN_SOURCE = "its source is not the known one"


def class_of(kind: MlaClass) -> type | str:
    """mlx-lm's class of that name, or why there is none."""
    found = held_by(f"mlx_lm.models.{kind.module}", kind.name)
    return found if isinstance(found, str) else cast(type, found)


def held_by(module: str, name: str) -> Any:
    """What a module holds by that name, or as text why nothing."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a broken install of mlx-lm fails in many ways
        return f"{type(error).__name__}: {error}"


def fingerprint(function: Any) -> str:
    """Digest of a function's own source without comments and layout; "" where there is none.

    A wrapper has its own source, not that of what it wraps.
    """
    try:
        source = inspect.getsource(function.__code__)
        text = ast.unparse(ast.parse(textwrap.dedent(source)))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forward(
    kind: MlaClass,
    module: Any,
    x: mx.array,
    query_scale: mx.array | None,
    cache: Any,
    attend: Attend,
) -> Any:
    """One call of an attention module with `attend` in its middle.

    x: `[batch, q_len, hidden]`, as is what it returns. The cache, if there is one, is written once.

    Raises:
        TunerError: the cache holds keys and values of every head; nothing was written.
    """
    low = x if "q_proj" in module else module.q_a_layernorm(module.q_a_proj(x))
    q_nope, q_pe = _queries(kind, module, low)
    if kind.indexed:
        cache, index_cache = cache[0], cache[1]
        module.indexer(x, low, None, cache=index_cache)
    latent, k_pe = mx.split(module.kv_a_proj_with_mqa(x), [module.kv_lora_rank], axis=-1)
    latent = module.kv_a_layernorm(latent)
    if kind.lora_scales and module.mla_scale_kv_lora is not None:
        latent = latent * module.mla_scale_kv_lora
    latent, k_pe = latent[:, None], k_pe[:, None]  # [batch, 1, q_len, width]
    if kind.rope:
        offset = 0 if cache is None else cache.offset
        q_pe, k_pe = module.rope(q_pe, offset=offset), module.rope(k_pe, offset=offset)
    if query_scale is not None:
        q_nope, q_pe = q_nope * query_scale, q_pe * query_scale
    if cache is not None:
        _check_latent(cache)
        latent, k_pe = cache.update_and_fetch(latent, k_pe)
    if kind.indexed:  # nothing reads the index yet: without this its graph grows with every token
        cache.keys = mx.depends(cache.keys, [index_cache.keys, index_cache.values])
    out = attend(q_nope, q_pe, latent, k_pe)
    return kind.finish(module, x, out.transpose(0, 2, 1, 3))


def _check_latent(cache: Any) -> None:
    """A prompt cache may come from a file, written by a model that was not absorbed."""
    keys = getattr(cache, "keys", None)
    heads = 1 if keys is None else (keys if isinstance(keys, mx.array) else keys[0]).shape[1]
    if heads != 1:
        raise TunerError(
            f"this prompt cache holds keys and values of {heads} heads, and this model one latent "
            "a token: make it anew, or load the model without absorb"
        )


def plain(
    q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attention in latent space in MLX's own operations, under a mask of any kind.

    q: `[batch, heads, q_len, kv_lora_rank]`, as is what it returns.
    """
    scores = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    if isinstance(mask, str):
        tokens, q_len = latent.shape[2], q.shape[2]
        mask = mx.arange(tokens) <= mx.arange(tokens - q_len, tokens)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(q, latent, latent, scale=scale, mask=scores)


def _queries(kind: MlaClass, module: Any, low: mx.array) -> tuple[mx.array, mx.array]:
    """Both parts of the query, `[batch, heads, q_len, qk_nope_head_dim]` and `[.., rope_dim]`.

    low: the input, or its compression where the module has one: `[batch, q_len, width]`.
    """
    q = (module.q_proj if "q_proj" in module else module.q_b_proj)(low)
    q = mx.unflatten(q, -1, (getattr(module, kind.heads), -1)).transpose(0, 2, 1, 3)
    if kind.lora_scales and module.mla_scale_q_lora is not None:
        q = q * module.mla_scale_q_lora
    q_nope, q_pe = mx.split(q, [module.qk_nope_head_dim], axis=-1)
    return q_nope, q_pe
