"""mlx-lm through the tuned plan: the same answers, by kernels that ran, or by stock code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from serving_steps import (
    BOUND,
    KINDS,
    PROMPT,
    StubPolicy,
    attentions,
    decode,
    distance,
    padded,
    tokens,
)
from tiny_models import CONFIGS, tiny_model

from mla_tuner import last_run, ops
from mla_tuner.integrations import routing
from mla_tuner.integrations.absorb import CLASSES as ABSORBABLE
from mla_tuner.integrations.mla_classes import CLASSES
from mla_tuner.integrations.mlx_lm import install, patch, stats
from mla_tuner.plan import MLX, Plan

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

# mx.compile takes seconds for the linear attention beside these two: their class is tested alone.
COMPILED = {"kimi_linear", "kimi_k3"}
WHOLE = [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in CONFIGS]


# --- the same answers, by kernels that ran


def test_every_class_of_this_release_is_routed() -> None:
    routed = {f"{kind.module}.{kind.name}": "routed" for kind in CLASSES}
    later = {f"{kind.module}.{kind.name}": "routed once it is absorbed" for kind in ABSORBABLE}
    shared = {"base.scaled_dot_product_attention": "routed"}
    assert install(StubPolicy()).classes == routed | later | shared


def test_every_class_has_a_tiny_model() -> None:
    assert CONFIGS.keys() == KINDS.keys()


CACHES = {
    "default": (1, None, (1, 3, 1, 8)),
    "default batch": (3, None, (1, 2)),
    "left padding": (3, padded([7, 0, 40]), (1, 3, 1)),
    "one padded row": (1, padded([5]), (1, 1)),
}


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("name", WHOLE)
def test_logits_are_those_of_stock_at_every_step(name: str, caches: str) -> None:
    model = tiny_model(name)
    theirs = decode(model, *CACHES[caches])
    with patch(StubPolicy()):
        ours = decode(model, *CACHES[caches])
        ran = last_run()
    q_lens = CACHES[caches][2]
    layers = len(attentions(model, KINDS[name]))
    assert distance(ours, theirs) < BOUND
    assert ran is not None
    assert ran.executed is not None
    assert (ran.executed.path, ran.executed.partitions) == ("split", 2)
    assert ran.decision.source == "tuned"
    assert stats().plans == {"split x2": layers * len(q_lens)}
    assert stats().reasons == {"prefill": layers}
    assert stats().look_ups == len(q_lens)


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_attention_alone_is_that_of_stock(name: str) -> None:
    module = attentions(tiny_model(name), KINDS[name])[0]

    def steps() -> list[mx.array]:
        cache = KVCache()
        mx.random.seed(1)
        outs = []
        for q_len in (PROMPT, 1, 4, 1):
            x = mx.random.normal((2, q_len, 32))
            mask = cache.make_mask(q_len, return_array=True, window_size=None)
            outs.append(module(x, mask, cache))
            mx.eval(outs[-1])
        return outs

    theirs = steps()
    with patch(StubPolicy()):
        ours = steps()
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 3}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_halves_are_as_near_to_float32_as_stock(dtype: mx.Dtype) -> None:
    """The attention module's output: the same weights and input, in float32 for the truth."""
    module = attentions(tiny_model("deepseek_v3", dtype), KINDS["deepseek_v3"])[0]
    x = mx.random.normal((1, PROMPT + 1, 32), key=mx.random.key(5)).astype(dtype)

    def last(x: mx.array) -> mx.array:
        cache = KVCache()
        module(x[:, :-1], cache.make_mask(PROMPT, return_array=True, window_size=None), cache)
        return module(x[:, -1:], None, cache).astype(mx.float32)

    theirs = last(x)
    with patch(StubPolicy()):
        ours = last(x)
    assert stats().routed == 1
    module.set_dtype(mx.float32)
    truth = last(x.astype(mx.float32))
    assert distance([ours], [truth]) <= 1.2 * distance([theirs], [truth])


def test_an_indexed_class_is_routed_while_it_is_dense() -> None:
    model = tiny_model("deepseek_v32", index_topk=PROMPT + 4)
    case = 1, None, (1, 3, 1, 1)
    theirs = decode(model, *case)
    with patch(StubPolicy()):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 4}
    assert stats().reasons == {"prefill": 2, "more tokens than the indexer keeps": 4}


def test_an_index_of_other_tokens_runs_stock() -> None:
    model = tiny_model("deepseek_v32")
    cache = make_prompt_cache(model)
    mx.eval(model(tokens(1, PROMPT), cache=cache))
    cache[0][1].trim(1)
    with patch(StubPolicy()):
        mx.eval(model(tokens(1, 1), cache=cache))
    assert stats().reasons == {"an index of other tokens than the cache": 1}
    assert stats().routed == 1


def test_quantised_weights() -> None:
    model = tiny_model("deepseek_v3", qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=32)
    nn.quantize(model, group_size=32, bits=8)
    module = attentions(model, KINDS["deepseek_v3"])[0]
    assert type(module.embed_q).__name__ == "QuantizedMultiLinear"
    theirs = decode(model, *CACHES["default"])
    with patch(StubPolicy()):
        ours = decode(model, *CACHES["default"])
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 8


def test_without_its_rope_part_an_answer_is_seen_to_be_wrong(
    deepseek: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unroped(q: mx.array, q_pe: mx.array, *rest: Any, **options: Any) -> mx.array:
        return ops.mla_decode(q, mx.zeros_like(q_pe), *rest, **options)

    monkeypatch.setattr(routing, "mla_decode", unroped)
    theirs = decode(deepseek, 1, None, (1,))
    with patch(StubPolicy()):
        ours = decode(deepseek, 1, None, (1,))
    assert stats().routed == 2
    assert distance(ours, theirs) > 10 * BOUND


# --- one look-up a step, for what it is


def test_the_policy_is_asked_for_the_longest_context_and_the_effective_batch(deepseek: Any) -> None:
    policy = StubPolicy()
    with patch(policy):
        decode(deepseek, 3, padded([0, 40, 40]), (1, 2))
    shape = (4, "float32")
    assert policy.asked == [
        (PROMPT + 1, 2, *shape, 1, (512, 64), "dense"),
        (PROMPT + 3, 2, *shape, 2, (512, 64), "dense"),
    ]


def test_the_plan_mlx_is_the_engines_own_code(deepseek: Any) -> None:
    theirs = decode(deepseek, 1, None, (1, 1))
    with patch(StubPolicy(MLX)):
        ours = decode(deepseek, 1, None, (1, 1))
    assert distance(ours, theirs) == 0
    assert stats().reasons == {"prefill": 2, "the plan is mlx (tuned)": 4}
    assert stats().routed == 0


def test_without_a_policy_that_of_the_process_decides(deepseek: Any) -> None:
    with patch():
        decode(deepseek, 1, None, (1,))
    assert stats().reasons == {"prefill": 2, "the plan is mlx (gates)": 2}


def test_a_refused_plan_is_counted_as_what_ran(deepseek: Any) -> None:
    with patch(StubPolicy(Plan("single", tile="of another chip"))):
        decode(deepseek, 1, None, (1,))
    assert stats().plans == {"mlx": 2}


# --- whatever is not recognised runs stock


def call_once(model: Any, mask: Any, cache: Any, q_len: int = 1) -> None:
    attention = model.layers[0].self_attn
    mx.eval(attention(mx.ones((1, q_len, 32)), mask, cache))


def filled(cache: Any) -> Any:
    cache.update_and_fetch(mx.ones((1, 1, 4, 512)), mx.ones((1, 1, 4, 64)))
    return cache


class Subclass(KVCache):
    """A cache of someone else's."""


@pytest.mark.parametrize(
    ("mask", "make_cache", "q_len", "reason"),
    [
        (None, lambda: filled(Subclass()), 1, "a cache of type Subclass"),
        (mx.ones((1, 5)) > 0, lambda: filled(KVCache()), 1, "a mask that the cache did not make"),
        (None, lambda: filled(KVCache()), 2, "a mask that the cache did not make"),
        (None, lambda: filled(BatchKVCache([0])), 1, "a mask that the cache did not make"),
        (mx.ones((1, 5)) > 0, lambda: filled(RotatingKVCache(9)), 1, "a mask that the cache did"),
    ],
)
def test_what_is_not_recognised_runs_stock_and_is_counted(
    deepseek: Any, mask: Any, make_cache: Callable[[], Any], q_len: int, reason: str
) -> None:
    with patch(StubPolicy()):
        call_once(deepseek, mask, make_cache(), q_len)
    assert stats().stock == 1
    assert next(iter(stats().reasons)).startswith(reason)


def test_without_a_cache_stock_runs(deepseek: Any) -> None:
    with patch(StubPolicy()):
        mx.eval(deepseek(tokens(1, 3)))
    assert stats().reasons == {"no cache": 2}


def test_a_model_in_training_runs_stock() -> None:
    model = tiny_model("deepseek_v3")
    model.train()
    with patch(StubPolicy()):
        mx.eval(model(tokens(1, 3), cache=make_prompt_cache(model)))
    assert stats().reasons == {"training mode": 2}


def test_a_width_that_no_kernel_has_runs_stock() -> None:
    model = tiny_model("deepseek_v3", kv_lora_rank=128)
    with patch(StubPolicy()):
        decode(model, 1, None, (1,))
    assert stats().reasons == {"prefill": 2, "4 heads of width 128+64": 2}


def test_a_quantised_cache_fails_as_it_does_in_stock(deepseek: Any) -> None:
    cache = [QuantizedKVCache() for _ in range(2)]
    with patch(StubPolicy()), pytest.raises(AttributeError, match="swapaxes"):
        deepseek(tokens(1, 1), cache=cache)
    assert stats().reasons == {"a cache of type QuantizedKVCache": 1}


@pytest.mark.parametrize("kind", [KVCache, lambda: RotatingKVCache(64)])
def test_an_offset_on_the_device_is_no_length(kind: Callable[[], Any], deepseek: Any) -> None:
    cache = kind()
    cache.offset = mx.array(3)
    attention, x = attentions(deepseek, KINDS["deepseek_v3"])[0], mx.zeros((1, 1, 32))
    router = routing.Router(StubPolicy())
    assert router.step(KINDS["deepseek_v3"], attention, x, None, cache) is None
    assert router.stats.reasons == {"lengths that are not known on the host": 1}


def test_padding_among_the_new_tokens_runs_stock(deepseek: Any) -> None:
    cache = [BatchKVCache([0, 2]) for _ in range(2)]
    with patch(StubPolicy()):
        mx.eval(deepseek(tokens(2, 4), cache=cache))
    assert stats().reasons == {"a token of padding among the new ones": 2}


def test_masks_that_mean_something_else_are_not_interpreted(
    deepseek: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release whose batch cache forbids more than its padding."""
    known = BatchKVCache.make_mask

    def other(cache: Any, *asked: Any, **options: Any) -> Any:
        return known(cache, *asked, **options).at[..., 0].multiply(False)

    monkeypatch.setattr(BatchKVCache, "make_mask", other)
    case = 2, padded([0, 5]), (1, 2)
    theirs = decode(deepseek, *case)
    with patch(StubPolicy()):
        assert BatchKVCache.make_mask is other
        ours = decode(deepseek, *case)
    assert distance(ours, theirs) == 0
    assert stats().reasons["a mask that the cache did not make"] == 4


def test_a_reason_is_one_log_line(deepseek: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mla_tuner")
    with patch(StubPolicy(MLX)):
        decode(deepseek, 1, None, (1, 1, 1))
    lines = [line for line in caplog.messages if "the plan is mlx" in line]
    assert lines == ["mlx-lm's own attention runs: the plan is mlx (tuned)"]
