"""Forwards of a paged MLA server, by vllm-metal or its stand-in: what the tests of it share.

Needs mlx-lm: a test imports it only once it knows that it is there.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import vllm_stub
from tiny_models import tiny_model

from mla_tuner.integrations import vllm_metal
from mla_tuner.integrations.counts import Stats
from mla_tuner.integrations.mla_classes import fingerprint
from mla_tuner.integrations.routing import FAILED

MODULE, CLASS = "vllm_metal.attention.impls.mla", "MLAPagedAttentionWrapper"
LAYERS, BLOCK, WIDTH, HIDDEN = 2, 16, 576, 32
RAGGED = (100, 17, 1, 64)  # tokens of each sequence, the new one included


def engines() -> dict[str, Callable[[pytest.MonkeyPatch], Any]]:
    """The stand-in, and the real thing where VLLM_METAL_CHECKOUT names a checkout."""
    real = {"checkout": real_engine} if "VLLM_METAL_CHECKOUT" in os.environ else {}
    return {"stand-in": stand_in, **real}


def real_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vllm-metal from that checkout."""
    checkout = os.environ["VLLM_METAL_CHECKOUT"]
    assert (Path(checkout) / "vllm_metal").is_dir(), checkout
    monkeypatch.syspath_prepend(checkout)
    names = ("attention.impls.mla", "attention.caches.mla_cache", "attention.context", "envs")
    wrapper, cache, context, envs = (import_module(f"vllm_metal.{name}") for name in names)
    return SimpleNamespace(
        MLAPagedAttentionWrapper=wrapper.MLAPagedAttentionWrapper,
        MLAPagedLatentCache=cache.MLAPagedLatentCache,
        PagedAttentionContext=context.PagedAttentionContext,
        set_context=context.set_context,
        envs=envs,
    )


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stub, in the place of vllm-metal and as the known source."""
    monkeypatch.setitem(sys.modules, MODULE, vllm_stub)
    methods = vars(vllm_stub.MLAPagedAttentionWrapper)
    known = {name: fingerprint(methods[name]) for name in vllm_metal._KNOWN}
    monkeypatch.setattr(vllm_metal, "_KNOWN", known)
    return vllm_stub


@contextmanager
def engine_as_it_is(engine: Any) -> Iterator[None]:
    """Gives the wrapper its own methods back at the end, whatever is bound by then."""
    owner = engine.MLAPagedAttentionWrapper
    stock = {name: vars(owner)[name] for name in vllm_metal._KNOWN}
    yield
    engine.set_context(None)
    for name, method in stock.items():
        setattr(owner, name, method)
    vllm_metal.uninstall()
    vllm_metal._bindings._held.clear()
    vllm_metal._last = Stats()
    FAILED.clear()


def mla_layers(dtype: mx.Dtype = mx.float32) -> list[Any]:
    """The attention modules of a tiny model."""
    return [layer.self_attn for layer in tiny_model("deepseek_v3", dtype).model.layers]


class Server:
    """Layers on a paged cache that holds sequences of these lengths in blocks out of order."""

    def __init__(
        self,
        engine: Any,
        layers: list[Any],
        lengths: tuple[int, ...] = RAGGED,
        dtype: mx.Dtype = mx.float32,
        block: int = BLOCK,
    ) -> None:
        self.engine, self.block = engine, block
        self.lengths = [length - 1 for length in lengths]
        count = [-(-(length + 8) // block) for length in lengths]  # room for 8 tokens
        free = random.Random(1).sample(range(sum(count)), sum(count))
        self.tables = [[free.pop() for _ in range(n)] for n in count]
        self.cache = engine.MLAPagedLatentCache(len(layers), WIDTH, sum(count), block, dtype)
        for i, each in enumerate(self.cache.latent_caches):
            latent = mx.random.normal(each.shape, key=mx.random.key(i)).astype(dtype)
            self.cache.latent_caches[i] = latent
        self.wrapped = [
            engine.MLAPagedAttentionWrapper(layer, i, self.cache) for i, layer in enumerate(layers)
        ]

    def context(self) -> Any:
        """The next forward: one new token a sequence."""
        slots = [
            table[n // self.block] * self.block + n % self.block
            for table, n in zip(self.tables, self.lengths, strict=True)
        ]
        offsets = list(self.lengths)
        self.lengths = [n + 1 for n in self.lengths]
        return self.engine.PagedAttentionContext(
            slot_mapping=slots,
            block_tables=self.tables,
            context_lens=list(self.lengths),
            offsets=offsets,
            cu_seqlens=list(range(len(slots) + 1)),
        )

    def forward(self, context: Any, seed: int = 0) -> mx.array:
        """What the last layer gives for one forward, `[1, rows, hidden]`."""
        self.engine.set_context(context)
        dtype = self.cache.dtype
        x = mx.random.normal((1, context.cu_seqlens[-1], HIDDEN), key=mx.random.key(seed + 9))
        x = x.astype(dtype)
        for wrapper in self.wrapped:
            x = x + wrapper(x)
        mx.eval(x)
        return x

    def decode(self, steps: int = 3) -> list[mx.array]:
        return [self.forward(self.context(), step) for step in range(steps)]
