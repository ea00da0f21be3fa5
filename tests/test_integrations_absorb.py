"""Models that cache keys and values of every head, absorbed: the same answers from less memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from serving_steps import (
    BOUND,
    PROMPT,
    StubPolicy,
    decode,
    distance,
    generated,
    padded,
    rotating,
    spoken,
    tokens,
)
from tiny_models import FULL_CONFIGS, tiny_model

from mla_tuner import last_run, ops
from mla_tuner.errors import TunerError
from mla_tuner.integrations import absorb as absorption
from mla_tuner.integrations import routing
from mla_tuner.integrations.mlx_lm import absorb, install, patch, stats, uninstall
from mla_tuner.plan import MLX

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")


# --- the same answers

CACHES = {
    "default": (1, None, (1, 3, 12, 1, 8)),
    "left padding": (3, padded([7, 0, 40]), (1, 3, 1)),
    "rotating": (1, rotating, (1, 1, 1, 3, 1)),
}
WEIGHTS = {
    "plain": None,
    "8 bits": {"bits": 8, "group_size": 32},
    "4 bits": {"bits": 4, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def full_model(name: str, weights: str = "plain", **changes: Any) -> Any:
    model = tiny_model(name, **changes)
    if options := WEIGHTS[weights]:
        kept = {"class_predicate": lambda path, module: path.endswith("kv_b_proj")}
        nn.quantize(model, **options, **kept)
    return model


ALL = [
    pytest.param(*both, marks=[pytest.mark.slow] * (both[0] != "plain" and both[1] != "default"))
    for both in product(WEIGHTS, CACHES)
]


@pytest.mark.parametrize(("weights", "caches"), ALL)
@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_logits_are_those_of_stock_at_every_step(name: str, weights: str, caches: str) -> None:
    """Quantised weights, too: they are cut, not quantised anew."""
    model, case = full_model(name, weights), CACHES[caches]
    theirs = decode(model, *case)
    with patch(StubPolicy(), absorb=True):
        ours = decode(model, *case)
        ran = last_run()
    assert distance(ours, theirs) < BOUND
    routed = sum(q_len <= 8 for q_len in case[2])
    assert stats().plans == {"split x2": 2 * routed}
    assert stats().reasons == {"prefill": 2 * (1 + len(case[2]) - routed)}
    assert stats().look_ups <= routed
    assert ran is not None
    assert ran.executed is not None
    assert ran.executed.path == "split"


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_and_so_they_are_where_the_plan_is_mlx(name: str, caches: str) -> None:
    model, case = full_model(name), CACHES[caches]
    theirs = decode(model, *case)
    with patch(StubPolicy(MLX), absorb=True):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 0
    assert stats().stock == 2 * (1 + len(case[2]))
    assert type(model.layers[0].self_attn).__name__.startswith("Absorbed")


def test_without_its_rope_part_an_answer_is_seen_to_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unroped(q: mx.array, q_pe: mx.array, *rest: Any, **options: Any) -> mx.array:
        return ops.mla_decode(q, mx.zeros_like(q_pe), *rest, **options)

    monkeypatch.setattr(routing, "mla_decode", unroped)
    for name in FULL_CONFIGS:
        model = full_model(name)
        theirs = decode(model, 1, None, (1,))
        with patch(StubPolicy(), absorb=True):
            ours = decode(model, 1, None, (1,))
        assert stats().routed == 2
        assert distance(ours, theirs) > 10 * BOUND


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_halves_are_as_near_to_float32_as_stock(name: str, dtype: mx.Dtype) -> None:
    """Root mean square over some sequences: of a single output, either may be nearer."""
    module = tiny_model(name, dtype).layers[0].self_attn
    x = mx.random.normal((16, PROMPT + 1, 32), key=mx.random.key(5)).astype(dtype)

    def last(x: mx.array) -> mx.array:
        cache = KVCache()
        module(x[:, :-1], "causal", cache)
        return module(x[:, -1:], None, cache).astype(mx.float32)

    theirs = last(x)
    module.set_dtype(mx.float32)
    truth = last(x.astype(mx.float32))
    module.set_dtype(dtype)
    with patch(StubPolicy(), absorb=True):
        ours = last(x)
    assert stats().routed == 1
    errors = [float(mx.sqrt(mx.mean((each - truth) ** 2))) for each in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1]


def test_a_model_called_without_a_cache() -> None:
    model = full_model("minicpm3")
    theirs = model(tokens(2, 20))
    assert absorb(model) == 2
    assert distance([model(tokens(2, 20))], [theirs]) < BOUND


def test_a_quantised_cache() -> None:
    """Stock quantises keys and values, absorbed the latent: 8 bits are near to none in both."""
    model = full_model("deepseek_v2", qk_nope_head_dim=64, v_head_dim=64)

    def step() -> mx.array:
        cache = [QuantizedKVCache(bits=8) for _ in range(2)]
        model(tokens(1, PROMPT), cache=cache)
        return model(tokens(1, 1), cache=cache)

    exact, stock = decode(model, 1, None, (1,)), [step()]
    with patch(StubPolicy(), absorb=True):
        ours = [step()]
    assert stats().reasons == {"prefill": 2, "a cache of type QuantizedKVCache": 2}
    assert distance(ours, exact) < 3 * distance(stock, exact)


@pytest.mark.parametrize("weights", ["plain", "4 bits"])
def test_heads_that_tensor_parallelism_has_cut(weights: str) -> None:
    """Here into one part; what counts is the type of the layer."""
    model = full_model("deepseek_v2", weights)
    theirs = decode(model, 1, None, (1, 3))
    for layer in model.layers:
        attention = layer.self_attn
        attention.kv_b_proj = shard_linear(attention.kv_b_proj, "all-to-sharded")
    with patch(StubPolicy(), absorb=True):
        ours = decode(model, 1, None, (1, 3))
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 4


# --- what it saves


_LITE = {"num_attention_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128}
_MINICPM3 = {"num_attention_heads": 40, "qk_nope_head_dim": 64, "hidden_size": 2560}
REAL = {
    "deepseek_v2": (_LITE, 8.9),  # V2-Lite, Coder-V2-Lite
    "youtu_llm": (_LITE, 8.9),  # Youtu-LLM-2B
    "minicpm3": (_MINICPM3, 22.2),  # MiniCPM3-4B
}


@pytest.mark.parametrize("name", REAL)
def test_the_cache_of_the_real_widths_shrinks(name: str) -> None:
    widths, factor = REAL[name]
    model = tiny_model(name, mx.bfloat16, num_hidden_layers=1, **widths)

    def cached() -> int:
        cache = make_prompt_cache(model)
        model(tokens(1, 256), cache=cache)
        return int(cache[0].nbytes)

    full = cached()
    absorb(model)
    assert full / cached() == pytest.approx(factor, abs=0.05)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_weights_are_as_large_as_before(weights: str) -> None:
    model = full_model("deepseek_v2", weights)
    projection = model.layers[0].self_attn.kv_b_proj
    before = sum(each.nbytes for each in projection.parameters().values())
    absorb(model)
    module = model.layers[0].self_attn
    halves = [*module.embed_q.parameters().values(), *module.unembed_out.parameters().values()]
    assert sum(each.nbytes for each in halves) == before
    assert "kv_b_proj" not in module


# --- asked for, said, undone


def test_it_is_opt_in(caplog: pytest.LogCaptureFixture) -> None:
    model = full_model("deepseek_v2")
    with patch(StubPolicy()):
        decode(model, 1, None, (1,))
    assert (stats().routed, stats().stock) == (0, 0)
    assert "kv_b_proj" in model.layers[0].self_attn
    assert caplog.messages == []


def test_it_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with patch(StubPolicy(), absorb=True):
        decode(full_model("minicpm3"), 1, None, (1, 1))
    (line,) = caplog.messages
    assert line.startswith("minicpm3 is absorbed: a layer caches 288 numbers a token, not 224; ")


def test_a_second_install_may_ask_for_it() -> None:
    model = full_model("youtu_llm")
    install(StubPolicy())
    decode(model, 1, None, (1,))
    install(absorb=True)
    install()
    decode(model, 1, None, (1,))
    assert stats().routed == 2


def test_after_uninstall_an_absorbed_model_goes_on_and_others_stay() -> None:
    model, other = full_model("deepseek_v2"), full_model("deepseek_v2")
    theirs = decode(model, 1, None, (1, 3))
    call = vars(type(model.layers[0].self_attn))["__call__"]
    for _ in range(2):
        with patch(StubPolicy(), absorb=True):
            decode(model, 1, None, (1, 3))
        assert stats().routed == 4
        assert distance(decode(model, 1, None, (1, 3)), theirs) < BOUND
    assert vars(type(other.layers[0].self_attn))["__call__"] is call
    decode(other, 1, None, (1,))
    assert "kv_b_proj" in other.layers[0].self_attn


def test_a_model_absorbed_by_hand_is_routed_too() -> None:
    model = full_model("deepseek_v2")
    assert (absorb(model), absorb(model)) == (2, 0)
    with patch(StubPolicy()):
        decode(model, 1, None, (1,))
    assert stats().routed == 2


def test_another_model_has_nothing_to_absorb() -> None:
    assert absorb(tiny_model("deepseek_v3")) == 0


# --- what is left alone


class Adapter(nn.Linear):  # type: ignore[misc]
    """A layer that is more than its weight."""


def test_a_projection_with_an_adapter_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = full_model("deepseek_v2")
    model.layers[1].self_attn.kv_b_proj.__class__ = Adapter
    theirs = decode(model, 1, None, (1, 1))
    with patch(StubPolicy(), absorb=True):
        ours = decode(model, 1, None, (1, 1))
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 2}
    assert caplog.messages[1:] == ["deepseek_v2 is not absorbed: its kv_b_proj is of type Adapter"]


def test_a_projection_with_a_bias_stays() -> None:
    model = full_model("youtu_llm")
    model.layers[0].self_attn.kv_b_proj.bias = mx.zeros(128)
    assert absorb(model) == 1


def test_a_model_in_training_stays() -> None:
    model = full_model("deepseek_v2")
    model.train()
    with patch(StubPolicy(), absorb=True):
        model(tokens(1, 3), cache=make_prompt_cache(model))
    assert "kv_b_proj" in model.layers[0].self_attn


def test_a_class_of_another_release_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = full_model("minicpm3")
    owner = type(model.layers[0].self_attn)
    stock = owner.__call__

    def other(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        return stock(self, x, mask, cache)

    monkeypatch.setattr(owner, "__call__", other)
    with patch(StubPolicy(), absorb=True):
        assert vars(owner)["__call__"] is other
        decode(model, 1, None, (1,))
    assert absorb(model) == 0
    assert stats().classes["minicpm3.Attention"] == "its source is not the known one"


def test_a_wrapper_that_came_later_still_absorbs_after_a_new_install() -> None:
    model = full_model("deepseek_v2")
    owner = type(model.layers[0].self_attn)
    install(StubPolicy(), absorb=True)
    inner = owner.__call__

    def foreign(self: Any, *arguments: Any, **options: Any) -> Any:
        return inner(self, *arguments, **options)

    owner.__call__ = foreign
    uninstall()
    decode(model, 1, None, (1,))
    assert "kv_b_proj" in model.layers[0].self_attn
    install(StubPolicy(), absorb=True)
    decode(model, 1, None, (1,))
    assert stats().routed == 2


# --- prompt caches in files


@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_a_prompt_cache_saved_by_stock_is_refused(name: str, tmp_path: Path) -> None:
    model, file = full_model(name), str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model)
    model(tokens(1, PROMPT), cache=cache)
    save_prompt_cache(file, cache)
    says = r"^this prompt cache holds keys and values of 4 heads, and this model one latent a token"
    for policy in (StubPolicy(), StubPolicy(MLX)):
        with patch(policy, absorb=True), pytest.raises(TunerError, match=says) as refused:
            model(tokens(1, 1), cache=load_prompt_cache(file))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_a_prompt_cache_saved_absorbed_goes_on(name: str, tmp_path: Path) -> None:
    model, file = full_model(name), str(tmp_path / "cache.safetensors")
    theirs = decode(model, 1, None, (1,))
    with patch(StubPolicy(), absorb=True):
        cache = make_prompt_cache(model)
        model(tokens(1, PROMPT), cache=cache)
        save_prompt_cache(file, cache)
        ours = model(tokens(1, 1, seed=0), cache=load_prompt_cache(file))
    assert distance([ours], theirs) < BOUND
    assert stats().routed == 2


# --- faults, and as mlx-lm generates


@pytest.mark.parametrize("name", FULL_CONFIGS)
def test_generation_and_a_draft_model(name: str) -> None:
    model, draft = full_model(name), full_model(name, num_hidden_layers=1)
    theirs = generated(model), spoken(model, draft)
    with patch(StubPolicy(), absorb=True):
        assert (generated(model), spoken(model, draft)) == theirs
    assert stats().routed >= 20
    assert set(stats().reasons) == {"prefill"}


def test_a_projection_is_cut_once_though_threads_come_together() -> None:
    model = full_model("deepseek_v2")
    module, (kind, *_) = model.layers[0].self_attn, absorption.CLASSES
    assert absorption._absorb(kind, module)
    assert absorption._absorb(kind, module)  # as the second thread finds it
