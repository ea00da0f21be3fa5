"""Decode steps of tiny models with and without the plan: what the tests of serving share.

Needs mlx-lm: a test imports it only once it knows that it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from tiny_models import VOCABULARY

from mla_tuner import ops
from mla_tuner.caches import PagedCache
from mla_tuner.integrations import absorb, mlx_lm, routing, shared_attention
from mla_tuner.integrations.bindings import Bindings
from mla_tuner.integrations.counts import Stats
from mla_tuner.integrations.mla_classes import CLASSES, MlaClass
from mla_tuner.plan import Decision, Plan

SPLIT = Plan("split", 2)
PROMPT = 80  # tokens: more than a piece of the context has
BOUND = 1e-4
ATTENTION = "scaled_dot_product_attention"
KINDS = {kind.module: kind for kind in CLASSES}


class StubPolicy:
    """Answers with one plan, and remembers what it was asked.

    low: the least speed-up that the plan was measured to have; None: nobody measured it.
    """

    def __init__(self, plan: Plan = SPLIT, low: float | None = None) -> None:
        self.plan, self.low = plan, low
        self.asked: list[tuple[Any, ...]] = []

    def decide(self, *asked: Any) -> Decision:
        self.asked.append(asked)
        us = None if self.low is None else 1e3
        return Decision(self.plan, "tuned", "a test says so", us, speedup_low=self.low)


class Measured(StubPolicy):
    """Says that its plan is far faster than MLX's path."""

    def __init__(self, plan: Plan = SPLIT, low: float | None = 1e6) -> None:
        super().__init__(plan, low)


def breaking(after: int) -> Callable[..., mx.array]:
    """An operation that works that often and raises from then on."""
    left = [after]

    def broken(*arguments: Any, **options: Any) -> mx.array:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no such kernel")
        return ops.mla_decode(*arguments, **options)

    return broken


def breaking_late(
    q_nope: mx.array, q_pe: mx.array, cache: object, *, scale: float, **options: Any
) -> mx.array:
    """An operation whose answer raises where it is asked for, as of a kernel that won't compile."""
    batch, _, q_len, rank = q_nope.shape
    blocks = mx.zeros((1, 8, rank + q_pe.shape[-1]), q_nope.dtype)
    nowhere = mx.full((batch, 1), 99, mx.int32)
    paged = PagedCache(blocks, nowhere, [q_len] * batch)
    return ops.mla_decode(q_nope, q_pe, paged, scale=scale, plan=Plan("single"))


@contextmanager
def mlx_lm_as_it_is() -> Iterator[None]:
    """Gives mlx-lm its own methods back at the end, whatever is bound by then."""
    absorbable = [absorb.class_of(kind) for kind in absorb.CLASSES]
    owners = [*map(attention_class, KINDS), *absorbable]
    stock = {owner: vars(owner)["__call__"] for owner in owners}
    functions = {holder: getattr(holder, ATTENTION) for holder in holders()}
    shared = getattr(base, ATTENTION)
    yield
    for owner, call in stock.items():
        owner.__call__ = call
    for holder in holders():  # those that were loaded meanwhile, too
        setattr(holder, ATTENTION, functions.get(holder, shared))
    mlx_lm.uninstall()
    shared_attention._ours.clear()
    absorb._said.clear()
    routing.FAILED.clear()
    mlx_lm._bindings = Bindings()
    mlx_lm._last = Stats()


def holders() -> list[Any]:
    """mlx-lm's modules that hold the attention function that its models share."""
    models = [each for name, each in sys.modules.items() if name.startswith("mlx_lm.models.")]
    return [each for each in models if hasattr(each, ATTENTION)]


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


def each_kv_cache(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """What a test makes in the place of the model's own KVCaches, in lists of caches, too."""

    def convert(cache: Any) -> Any:
        if isinstance(cache, KVCache):
            return make()
        if isinstance(cache, CacheList):
            return CacheList(*map(convert, cache.caches))
        return cache

    return convert


rotating = each_kv_cache(lambda: RotatingKVCache(max_size=PROMPT + 2, keep=4))


def rotating_batch(padding: list[int]) -> Callable[[Any], Any]:
    return each_kv_cache(lambda: BatchRotatingKVCache(PROMPT + 2, padding))


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


def generated(model: Any, **options: Any) -> list[int]:
    """Tokens that a prompt goes on with."""
    steps = generate_step(tokens(PROMPT), model, max_tokens=6, **options)
    return [int(token) for token, _ in steps]


def spoken(model: Any, draft: Any) -> list[int]:
    """The same with a draft model, whose tokens are verified some at once."""
    steps = speculative_generate_step(tokens(PROMPT), model, draft, max_tokens=6)
    return [int(token) for token, *_ in steps]


def batched(model: Any, **options: Any) -> dict[int, list[int]]:
    """Continuous batching: left padding, rows that leave, rows that join."""
    generator = BatchGenerator(model, prefill_batch_size=2, completion_batch_size=3, **options)
    prompts = [tokens(length, seed=length).tolist() for length in (70, 9, 90, 33, 12)]
    generator.insert(prompts, [3, 9, 5, 7, 4])
    found: dict[int, list[int]] = {}
    while responses := generator.next_generated():
        for response in responses:
            found.setdefault(response.uid, []).append(response.token)
    generator.close()
    return found


def distance(ours: list[mx.array], theirs: list[mx.array]) -> float:
    return max(float(mx.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def attentions(model: Any, kind: MlaClass) -> list[Any]:
    return [each for _, each in model.named_modules() if type(each).__name__ == kind.name]


def attention_class(name: str) -> type:
    kinds = {kind.module: kind for kind in (*CLASSES, *absorb.CLASSES)}
    return getattr(import_module(f"mlx_lm.models.{name}"), kinds[name].name)
