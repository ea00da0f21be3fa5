"""Binding to the attention function that models share, of mlx-lm and of mlx-vlm."""

from __future__ import annotations

import sys
from functools import wraps
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from latent_calls import SCALE, Call, OwnCache
from mlx_lm.models import base, deepseek_v3
from mlx_lm.models.cache import KVCache
from serving_steps import ATTENTION, BOUND, KINDS, PROMPT, Measured, attentions, distance, holders
from tiny_models import tiny_model

from mla_tuner.integrations.mlx_lm import install, stats, uninstall

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")


def bound() -> dict[str, Any]:
    return {holder.__name__: getattr(holder, ATTENTION) for holder in holders()}


def late_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A model's module that is loaded only now."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(f"from mlx_lm.models.base import {ATTENTION}", vars(module))
    return module


def test_every_module_that_holds_the_function_is_bound_and_given_back() -> None:
    before = bound()
    assert {"mlx_lm.models.base", "mlx_lm.models.deepseek_v3"} <= before.keys()
    assert len(set(before.values())) == 1
    for _ in range(2):
        install(Measured())
        (ours,) = set(bound().values())
        assert ours not in before.values()
        install(Measured())
        assert set(bound().values()) == {ours}
        uninstall()
        assert bound() == before


def test_a_module_that_is_loaded_later_has_ours_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, stock = Call(), base.scaled_dot_product_attention
    install(Measured())
    late = late_module(monkeypatch, "mlx_lm.models.late")
    arguments = call.queries, call.latent, call.latent, call.cache, SCALE, call.mask
    for routed in (1, 2):
        late.scaled_dot_product_attention(*arguments)
        assert stats().routed == routed
    taken = late.scaled_dot_product_attention  # by someone who keeps it
    uninstall()
    assert late.scaled_dot_product_attention is stock
    assert distance([taken(*arguments)], [stock(*arguments)]) == 0
    install(Measured())
    assert taken is late.scaled_dot_product_attention is base.scaled_dot_product_attention
    taken(*arguments)
    assert stats().routed == 1


def wrap(calls: list[int]) -> Any:
    """Someone else's wrapper with the same parameters, in the place of all that is bound."""
    inner = base.scaled_dot_product_attention

    def wrapper(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        calls.append(1)
        return inner(queries, keys, values, cache, scale, mask, sinks)

    for holder in holders():
        if getattr(holder, ATTENTION) is inner:
            setattr(holder, ATTENTION, wrapper)
    return wrapper


def test_a_wrapper_that_came_later_stays_and_passes_on() -> None:
    call, calls = Call(), list[int]()
    install(Measured())
    wrapper = wrap(calls)
    call.run()
    assert (len(calls), stats().routed) == (1, 1)
    uninstall()
    assert base.scaled_dot_product_attention is wrapper
    call.run()
    install(Measured())
    assert base.scaled_dot_product_attention is wrapper
    assert stats().classes[f"base.{ATTENTION}"] == "routed"
    call.run()
    assert (len(calls), stats().routed) == (3, 1)


def test_a_wrapper_that_was_there_before_gets_what_is_not_routed() -> None:
    call, calls = Call(), list[int]()
    wrapper = wrap(calls)
    install(Measured())
    call.run()
    assert (calls, stats().routed) == ([], 1)
    call.run(cache=OwnCache())
    assert calls == [1]
    uninstall()
    assert base.scaled_dot_product_attention is wrapper


def test_a_function_of_other_parameters_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return q

    def apart(
        queries: Any,
        keys: Any,
        values: Any,
        *,
        cache: Any,
        scale: Any,
        mask: Any,
        sinks: Any = None,
    ) -> Any:
        return queries

    def defaults(
        queries: Any, keys: Any, values: Any, cache: Any = 0, scale: Any = 1, mask: Any = 0,
        sinks: Any = None,
    ) -> Any:  # fmt: skip
        return queries

    stock = base.scaled_dot_product_attention
    named = wraps(stock)(lambda queries, keys, values, **named: named["cache"])
    for function in (other, apart, defaults, named, None):
        monkeypatch.setattr(base, ATTENTION, function)
        install(Measured())
        assert base.scaled_dot_product_attention is function
        assert stats().classes[f"base.{ATTENTION}"] == "its parameters are not the known ones"
        uninstall()


# --- mlx-vlm


def fake_vlm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attention class of an mlx-vlm: mlx-lm's, with a module and a function of its own."""

    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    modules = {}
    for name in ("", ".models", ".models.base", ".models.deepseek_v3.language"):
        modules[name] = ModuleType(f"mlx_vlm{name}")
        monkeypatch.setitem(sys.modules, f"mlx_vlm{name}", modules[name])
    language = modules[".models.deepseek_v3.language"]
    vars(language).update(vars(deepseek_v3))
    for module in (modules[".models.base"], language):
        setattr(module, ATTENTION, scaled_dot_product_attention)
    stock = unwrap(vars(deepseek_v3.DeepseekV3Attention)["__call__"])
    call = FunctionType(stock.__code__, vars(language), argdefs=stock.__defaults__)
    return type("VlmAttention", (deepseek_v3.DeepseekV3Attention,), {"__call__": call})


@pytest.mark.parametrize("again", [False, True])
def test_mlx_vlm_is_routed_where_it_is_loaded(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if again:
        assert f"mlx_vlm.base.{ATTENTION}" not in install(Measured()).classes
    owner = fake_vlm(monkeypatch)
    attention = attentions(tiny_model("deepseek_v3"), KINDS["deepseek_v3"])[0]
    attention.__class__ = owner

    def steps() -> list[mx.array]:
        cache = KVCache()
        x = mx.random.normal((1, PROMPT, 32), key=mx.random.key(5))
        attention(x, cache.make_mask(PROMPT, return_array=True, window_size=None), cache)
        return [attention(x[:, at : at + 1], None, cache) for at in range(3)]

    theirs = steps()
    assert stats().routed == 0
    assert install(Measured()).classes[f"mlx_vlm.base.{ATTENTION}"] == "routed"
    assert distance(steps(), theirs) < BOUND
    assert stats().plans == {"split x2": 3}
    uninstall()
    assert distance(steps(), theirs) == 0
    assert stats().routed == 3


def test_an_mlx_vlm_that_took_the_function_of_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its releases did for long."""
    install(Measured())
    vlm = late_module(monkeypatch, "mlx_vlm.models.base")
    install(Measured())
    assert vlm.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert stats().classes[f"mlx_vlm.base.{ATTENTION}"] == "routed"


def test_an_mlx_vlm_that_took_a_wrapper_of_ours_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(Measured())
    ours = base.scaled_dot_product_attention
    wrapper = wraps(ours)(lambda *given, **named: ours(*given, **named))
    setattr(base, ATTENTION, wrapper)
    vlm = late_module(monkeypatch, "mlx_vlm.models.base")
    install(Measured())
    call = Call()
    vlm.scaled_dot_product_attention(
        call.queries, call.latent, call.latent, OwnCache(), scale=SCALE, mask=call.mask
    )
    assert stats().reasons == {"a cache of type OwnCache": 1}
