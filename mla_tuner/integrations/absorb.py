"""mlx-lm's models that cache keys and values of every head, made to cache one latent a token.

Their `kv_b_proj` makes keys and values from the latent. Split by heads, its two halves work on the
query and on the output instead, and the latent is all that attention reads.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from ..shapes import MAX_Q_LEN
from .mla_classes import UNKNOWN_SOURCE, MlaClass, class_of, fingerprint, forward, plain

log = logging.getLogger("mla_tuner")

CLASSES = (
    MlaClass("deepseek_v2", "DeepseekV2Attention", "0e7c875a6ee51fa4", absorbed=True),
    MlaClass("youtu_llm", "YoutuLLMAttention", "0e7c875a6ee51fa4", absorbed=True),
    MlaClass(*("minicpm3", "Attention", "7d622f25149c48b1"), scale="softmax_scale", absorbed=True),
)
_PLAIN = (Linear, AllToShardedLinear)  # the second holds whole heads, those of this device
_QUANTISED = (QuantizedLinear, QuantizedAllToShardedLinear)
_stock: dict[Any, Callable[..., Any]] = {}  # of what `absorbing` made
_lock = threading.Lock()
_said: set[str] = set()


def absorb(model: Any) -> int:
    """Absorb every attention module of `CLASSES` in a model, before it sees its first token.

    Returns how many were: 0 for a model without them. The answers stay the same; caches that the
    model filled before, in files too, don't fit any more. A module whose `kv_b_proj` is neither
    plain nor quantised, for instance one with an adapter, stays as it is: that is one log line.
    """
    kinds = {owner_of(kind): kind for kind in CLASSES}
    found = [(kinds.get(type(each)), each) for _, each in model.named_modules()]
    return sum(kind is not None and _absorb(kind, each) for kind, each in found)


def absorbing(
    kind: MlaClass, stock: Callable[..., Any], wanted: Callable[[], bool]
) -> Callable[..., Any]:
    """A `__call__` for mlx-lm's own class: a module is absorbed when it first fills a cache.

    Not earlier: by then adapters are there, and tensor parallelism has cut the heads. `wanted` is
    asked at every call.
    """

    @functools.wraps(stock)
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is None or self.training or not wanted() or not _absorb(kind, self):
            return stock(self, x, mask, cache)
        return self(x, mask, cache)  # its class is another one now

    _stock[call] = stock
    return call


def owner_of(kind: MlaClass) -> type | str:
    """mlx-lm's class, or why it is not the known one."""
    owner = class_of(kind)
    if isinstance(owner, str):
        return owner
    call = vars(owner).get("__call__")
    known = fingerprint(_stock.get(call, call)) == kind.fingerprint
    return owner if known else UNKNOWN_SOURCE


def _absorb(kind: MlaClass, module: Any) -> bool:
    """Whether a module could be absorbed; its class is `absorbed_class` of what it was then."""
    with _lock:
        if "kv_b_proj" not in module:  # another thread was here first
            return True
        why = _refusal(module.kv_b_proj)
        if why:
            _say(f"{kind.module} is not absorbed: {why}")
            return False
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        heads, width = getattr(module, kind.heads), nope + value
        full = heads * (width + module.qk_rope_head_dim)
        latent = module.kv_lora_rank + module.qk_rope_head_dim
        projection = module.kv_b_proj
        module.embed_q = _ToLatent(projection, heads, slice(0, nope))
        module.unembed_out = _FromLatent(projection, heads, slice(nope, width))
        mx.eval(module.embed_q.parameters(), module.unembed_out.parameters())
        del module["kv_b_proj"]
        owner: type = type(module)
        module.__class__ = absorbed_class(owner, kind)
        _say(
            f"{kind.module} is absorbed: a layer caches {latent} numbers a token, not {full}; "
            "prompt caches that were saved without absorb don't fit"
        )
    return True


@functools.cache
def absorbed_class(owner: type, kind: MlaClass) -> type:
    """What a module of class `owner` becomes."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return _call(kind, self, x, mask, cache)

    return type(f"Absorbed{owner.__name__}", (owner,), {"__call__": call})


def _call(kind: MlaClass, module: Any, x: mx.array, mask: Any, cache: Any) -> Any:
    """The module's call without a plan: what the path `mlx` is for it."""

    def attend(q_nope: mx.array, q_pe: mx.array, latent: Any, k_pe: Any) -> mx.array:
        if not isinstance(latent, mx.array):  # of a QuantizedKVCache: each a triple
            options = {"group_size": cache.group_size, "bits": cache.bits}
            latent, k_pe = mx.dequantize(*latent, **options), mx.dequantize(*k_pe, **options)
        scale = getattr(module, kind.scale)
        if q_nope.shape[2] <= MAX_Q_LEN:
            out = plain(module.embed_q(q_nope), q_pe, latent, k_pe, scale, mask)
            return cast(mx.array, module.unembed_out(out))
        keys = module.embed_q(latent, transpose=False)  # [batch, heads, tokens, nope]
        k_pe = mx.broadcast_to(k_pe, (*keys.shape[:-1], k_pe.shape[-1]))
        return mx.fast.scaled_dot_product_attention(
            mx.concatenate([q_nope, q_pe], axis=-1),
            mx.concatenate([keys, k_pe], axis=-1),
            module.unembed_out(latent),
            scale=scale,
            mask=mask,
        )

    return forward(kind, module, x, None, cache, attend)


class _FromLatent(Module):
    """A matrix for each head, cut from the rows of `kv_b_proj` without any rounding.

    weight: `[heads, width, kv_lora_rank]`, packed and with scales where the projection is.
    """

    def __init__(self, projection: Any, heads: int, rows: slice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.quantised = isinstance(projection, _QUANTISED)
        if self.quantised:
            self.group_size, self.bits = projection.group_size, projection.bits
            self.mode = projection.mode
        for name in ("weight", "scales", "biases"):
            if projection.get(name) is not None:
                whole = mx.unflatten(projection[name], 0, (heads, -1))
                self[name] = mx.contiguous(whole[:, rows])
        self.freeze()

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """From `[.., heads, q_len, kv_lora_rank]` to the heads' width, or back."""
        weight = self["weight"]
        if not self.quantised:
            return cast(mx.array, x @ (weight.swapaxes(-1, -2) if transpose else weight))
        return mx.quantized_matmul(
            *(x, weight, self["scales"], self.get("biases")),
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


class _ToLatent(_FromLatent):
    """The same the other way round, as mlx-lm's models call their `embed_q`."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return super().__call__(x, not transpose)


def _refusal(projection: Any) -> str | None:
    if type(projection) not in _PLAIN + _QUANTISED:
        return f"its kv_b_proj is of type {type(projection).__name__}"
    extra = {"bias", "global_scale"}.intersection(projection)
    return f"its kv_b_proj has a {extra.pop()}" if extra else None


def _say(line: str) -> None:
    """Once: every layer has the same to say."""
    if line not in _said:
        _said.add(line)
        log.warning(line)
