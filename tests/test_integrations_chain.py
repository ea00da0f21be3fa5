"""Beside engines that chain wrappers of their own on mlx-lm's attention function, as omlx does.

Such a wrapper takes the place of `scaled_dot_product_attention` in `mlx_lm.models.base` and in each
module of a model that holds it, answers for caches of its own, and passes the rest on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models import base
from mlx_lm.models.cache import KVCache
from serving_steps import ATTENTION as NAME
from serving_steps import BOUND, StubPolicy, decode, distance, holders, mlx_lm_as_it_is

from mla_tuner.integrations.mlx_lm import install, stats, uninstall

pytestmark = pytest.mark.usefixtures("kernel")

STEPS = (1, 3, 1)
LAYERS = 2


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with mlx_lm_as_it_is():
        yield


class OwnCache(KVCache):  # type: ignore[misc]
    """A cache that an engine keeps in a way of its own."""


def chain() -> Counter[str]:
    """One more wrapper of an engine around whatever is bound; counts its calls."""
    inner, calls = base.scaled_dot_product_attention, Counter[str]()

    def wrapper(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None):
        calls["seen"] += 1
        if not isinstance(cache, OwnCache):
            return inner(q, k, v, cache, scale, mask, sinks)
        calls["answered"] += 1
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    for holder in holders():
        if getattr(holder, NAME) is inner:
            setattr(holder, NAME, wrapper)
    return calls


def bound() -> dict[str, Any]:
    return {holder.__name__: getattr(holder, NAME) for holder in holders()}


@pytest.mark.parametrize("ours", [0, 1, 2], ids=["first", "between", "last"])
def test_routed_calls_pass_no_wrapper_and_others_pass_all(deepseek: Any, ours: int) -> None:
    theirs = decode(deepseek, 2, None, STEPS)
    chains = [chain() for _ in range(ours)]
    install(StubPolicy())
    chains += [chain() for _ in range(2 - ours)]
    assert distance(decode(deepseek, 2, None, STEPS), theirs) < BOUND
    assert stats().plans == {"split x2": LAYERS * len(STEPS)}
    assert stats().reasons == {"prefill": LAYERS}
    assert chains == [{"seen": LAYERS}] * 2
    outermost = bound()
    uninstall()
    assert bound() == outermost
    assert distance(decode(deepseek, 2, None, STEPS), theirs) == 0
    assert chains == [{"seen": LAYERS * (2 + len(STEPS))}] * 2


def test_an_engines_own_cache_is_left_to_its_wrapper(deepseek: Any) -> None:
    install(StubPolicy())
    inner, outer = chain(), chain()
    decode(deepseek, 1, lambda cache: OwnCache(), STEPS)
    calls = LAYERS * (1 + len(STEPS))
    assert stats().reasons == {"prefill": LAYERS, "a cache of type OwnCache": calls - LAYERS}
    assert outer == {"seen": calls, "answered": calls}
    assert inner == {}


def test_an_engine_may_take_its_wrappers_off_meanwhile(deepseek: Any) -> None:
    theirs = decode(deepseek, 1, None, STEPS)
    stock = bound()
    chain()
    install(StubPolicy())
    for holder in holders():
        setattr(holder, NAME, stock[holder.__name__])
    assert distance(decode(deepseek, 1, None, STEPS), theirs) < BOUND
    uninstall()
    assert bound() == stock
    assert distance(decode(deepseek, 1, None, STEPS), theirs) == 0
