"""Decode steps of tiny models with and without the plan: what the tests of serving share.

Needs mlx-lm: a test imports it only once it knows that it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from tiny_models import VOCABULARY

from mla_tuner.integrations import mlx_lm
from mla_tuner.integrations.counts import Stats
from mla_tuner.integrations.mla_classes import CLASSES, MlaClass
from mla_tuner.plan import Decision, Plan

SPLIT = Plan("split", 2)
PROMPT = 80  # tokens: more than a piece of the context has
BOUND = 1e-4
KINDS = {kind.module: kind for kind in CLASSES}


class StubPolicy:
    """Answers with one plan, and remembers what it was asked."""

    def __init__(self, plan: Plan = SPLIT) -> None:
        self.plan = plan
        self.asked: list[tuple[Any, ...]] = []

    def decide(self, *asked: Any) -> Decision:
        self.asked.append(asked)
        return Decision(self.plan, "tuned", "a test says so")


@contextmanager
def mlx_lm_as_it_is() -> Iterator[None]:
    """Gives mlx-lm its own methods back at the end, whatever is bound by then."""
    stock = {owner: vars(owner)["__call__"] for owner in map(attention_class, KINDS)}
    yield
    for owner, call in stock.items():
        owner.__call__ = call
    mlx_lm.uninstall()
    mlx_lm._bindings.clear()
    mlx_lm._last = Stats()


def tokens(*shape: int, seed: int = 3) -> mx.array:
    return mx.random.randint(0, VOCABULARY, shape, key=mx.random.key(seed))


def padded(padding: list[int]) -> Callable[[Any], Any]:
    """A batch of that left padding, in the place of the model's own KVCaches."""

    def convert(cache: Any) -> Any:
        if isinstance(cache, KVCache):
            return BatchKVCache(padding)
        if isinstance(cache, CacheList):
            return CacheList(*map(convert, cache.caches))
        cache.left_padding = mx.array(padding)
        return cache

    return convert


def rotating(cache: Any) -> Any:
    return RotatingKVCache(max_size=PROMPT + 2, keep=4) if isinstance(cache, KVCache) else cache


def decode(
    model: Any, batch: int, convert: Callable[[Any], Any] | None, q_lens: tuple[int, ...]
) -> list[mx.array]:
    """The logits of each step after a prompt."""
    cache = make_prompt_cache(model)
    if convert:
        cache = [convert(each) for each in cache]
    mx.eval(model(tokens(batch, PROMPT), cache=cache))
    logits = []
    for step, q_len in enumerate(q_lens):
        logits.append(model(tokens(batch, q_len, seed=step), cache=cache))
        mx.eval(logits[-1])
    return logits


def distance(ours: list[mx.array], theirs: list[mx.array]) -> float:
    return max(float(mx.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def attentions(model: Any, kind: MlaClass) -> list[Any]:
    return [each for _, each in model.named_modules() if type(each).__name__ == kind.name]


def attention_class(name: str) -> type:
    return getattr(import_module(f"mlx_lm.models.{name}"), KINDS[name].name)
