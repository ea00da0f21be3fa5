"""Attention classes that nobody recognised, through the function that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from latent_calls import SCALE, Call, OwnCache, rms
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from serving_steps import (
    BOUND,
    KINDS,
    PROMPT,
    Measured,
    StubPolicy,
    attentions,
    breaking,
    decode,
    distance,
    padded,
    rotating,
    rotating_batch,
    tokens,
)
from tiny_models import CONFIGS, tiny_model

from mla_tuner import last_run, ops
from mla_tuner.cases import TOLERANCE
from mla_tuner.integrations import mlx_lm, routing, shared_attention
from mla_tuner.integrations.mlx_lm import install, patch, stats
from mla_tuner.integrations.shared_attention import FunctionRouter, calls_for, pays
from mla_tuner.integrations.spans import Span
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import DEEPSEEK, Geometry
from tools import msl
from tools.msl.decode import EmulatedBackend

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

MOST = {
    getattr(mx, dtype): most for dtype, most in TOLERANCE.items()
}  # stock's is larger in halves


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention class is one of another release."""
    others = tuple(replace(kind, fingerprint="another") for kind in mlx_lm.CLASSES)
    monkeypatch.setattr(mlx_lm, "CLASSES", others)


# --- the same answers, by kernels that ran

# mx.compile takes seconds for the linear attention of these two.
SLOW = {"kimi_linear", "kimi_k3"}
MODELS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CONFIGS]
CACHES: dict[str, tuple[int, Callable[[Any], Any] | None]] = {
    "default": (1, None),
    "left padding": (3, padded([7, 0, 40])),
    "rotating": (1, rotating),
    "rotating batch": (3, rotating_batch([7, 0, 40])),
}


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_stock_at_every_step(name: str, caches: str, unknown: None) -> None:
    model, case = tiny_model(name), (*CACHES[caches], (1,) * 5)
    theirs = decode(model, *case)
    with patch(Measured()):
        ours = decode(model, *case)
        ran = last_run()
    layers = len(attentions(model, KINDS[name]))
    assert distance(ours, theirs) < BOUND
    assert ran is not None
    assert ran.executed is not None
    assert (ran.executed.path, ran.executed.partitions) == ("split", 2)
    assert stats().plans == {"split x2": 5 * layers}
    assert stats().reasons == {}
    assert stats().classes[f"{name}.{KINDS[name].name}"] == "its source is not the known one"
    assert stats().look_ups <= 5


def test_a_sparse_class_is_routed_on_the_tokens_that_it_gathers(unknown: None) -> None:
    model, case = tiny_model("deepseek_v32", index_topk=64), (2, None, (1, 1))
    theirs = decode(model, *case)
    with patch(policy := Measured()):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 4}
    assert {asked[0] for asked in policy.asked} == {64}


def test_the_layers_of_a_step_share_one_look_up(deepseek: Any, unknown: None) -> None:
    with patch(policy := Measured()):
        decode(deepseek, 3, padded([0, 40, 40]), (1, 1))
    shape = (4, "float32", 1, (512, 64), "dense")
    assert policy.asked == [(PROMPT + 1, 3, *shape), (PROMPT + 2, 3, *shape)]
    assert (stats().look_ups, stats().routed) == (2, 4)


def test_without_its_scores_an_answer_is_seen_to_be_wrong(
    deepseek: Any, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = shared_attention.rope_keys
    monkeypatch.setattr(shared_attention, "rope_keys", lambda *a: mx.zeros_like(turned(*a)))
    theirs = decode(deepseek, 1, None, (1,))
    with patch(Measured()):
        ours = decode(deepseek, 1, None, (1,))
    assert stats().routed == 2
    assert distance(ours, theirs) > 10 * BOUND


# --- against float64


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run however many calls that takes."""
    monkeypatch.setattr(shared_attention, "pays", lambda *asked: True)


ROWS = [
    (1, 1, 1),
    (3, 2, 8),
    (16, 1, 3),
    (20, 3, 1),
    (40, 1, 1),
    (64, 2, 1),
    (128, 1, 1),
    (16, 2, 8),
]


@pytest.mark.parametrize("masked", [None, -np.inf], ids=["lowest", "-inf"])
@pytest.mark.parametrize("larger", [1, 10, 30, 300])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_answers_are_nearer_than_those_of_stock(
    dtype: mx.Dtype, larger: float, masked: float | None, forced: None
) -> None:
    """By root mean square: of two roundings of one answer either may be the luckier."""
    calls = [
        Call(heads, dtype, batch=batch, q_len=q_len, masked=masked, larger=larger)
        for heads, batch, q_len in ROWS
    ]
    theirs = [call.errors(call.run()) for call in calls]
    with patch(Measured()):
        ours = [call.errors(call.run()) for call in calls]
    assert stats().plans == {"split x2": len(ROWS)}
    assert stats().reasons == {}
    assert max(each.max() for each in ours) < MOST[dtype]
    assert rms(ours) < rms(theirs)
    if dtype != mx.float32:  # not even in one of the calls
        assert all(a.max() <= b.max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("plan", [Plan("single"), Plan("single", tile="r16"), Plan("split", 4)])
@pytest.mark.parametrize("rank", [512, 256])
def test_every_plan_and_geometry(plan: Plan, rank: int, forced: None) -> None:
    call = Call(48, mx.bfloat16, rank=rank)
    theirs = call.error(call.run())
    with patch(policy := Measured(plan)):
        ours = call.error(call.run())
    assert ours < theirs
    assert stats().plans == {str(plan): 1}
    assert policy.asked == [(200, 1, 24, "bfloat16", 1, (rank, 64), "dense")]


def test_rope_keys_begin_where_a_gpu_can_read_them_at_once() -> None:
    for rows in range(1, 33):
        scores = mx.random.normal((2, 3, rows, 5), mx.float16)
        keys = shared_attention.rope_keys(scores, 64)
        assert keys.shape == (2, 3, 5, 64)
        own = keys[..., :rows], keys[..., rows : 2 * rows]
        assert all(mx.array_equal(each, scores.swapaxes(2, 3)) for each in own)
        strides = memoryview(keys).strides
        assert strides is not None
        assert (strides[2] % 16, strides[3]) == (0, 2)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_every_instruction_set(dtype: mx.Dtype, isa: str) -> None:
    call = Call(20, dtype, batch=2, masked=-np.inf, larger=30)
    theirs = call.errors(call.run())
    with patch(Measured()):
        ours = call.errors(call.run())
    assert ours.max() < MOST[dtype]
    assert rms([ours]) < rms([theirs])
    assert stats().routed == 1
    ran = last_run()
    assert ran is not None
    assert ran.detail["isa"] == isa


@pytest.mark.skipif(bool(msl.missing()), reason=msl.missing())
@pytest.mark.parametrize(("heads", "tile"), [(1, "v4t8"), (4, "v4t8"), (20, "r16t16")])
def test_metal_kernels_in_the_emulator(
    heads: int, tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(heads, mx.bfloat16, batch=2, tokens=130, masked=-np.inf)
    theirs = call.error(call.run())
    with msl.emulated() as launches, patch(Measured(Plan("split", 2, tile))):
        metal = EmulatedBackend()
        monkeypatch.setattr(ops, "_backend", lambda: metal)
        ours = call.error(call.run())
    assert ours < theirs
    assert [each.name.split("_")[1] for each in launches][1:] == ["reduce"]
    assert stats().plans == {f"split x2 {tile}": 1}


def test_one_mask_for_a_batch() -> None:
    call = Call(batch=2, q_len=2)
    call.mask = call.mask[:1]
    theirs = call.run()
    with patch(Measured()):
        assert distance([call.run()], [theirs]) < 1e-5
    assert stats().routed == 1


@pytest.mark.parametrize("low", [None, -np.inf])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_a_row_that_sees_nothing_spoils_no_other(dtype: mx.Dtype, low: float | None) -> None:
    call = Call(4, dtype)
    call.mask[:, 1] = mx.finfo(dtype).min if low is None else low
    with patch(Measured()):
        out = call.run()
    assert stats().routed == 1
    assert mx.isfinite(out).all()
    if dtype != mx.float16:  # whose lowest number leaves the products to count
        mean = call.latent.astype(mx.float32).mean(axis=2)
        assert distance([out[:, 1]], [mean]) < 1e-2
    call.queries, call.mask = call.queries[:, 2:], call.mask[:, 2:]
    assert call.error(out[:, 2:]) < call.error(call.run()) + 1e-5


def test_a_compiled_step_is_traced_for_each_shape() -> None:
    calls = [Call(tokens=count) for count in (200, 201)]
    theirs = [call.run() for call in calls]
    with patch(Measured()):
        step = mx.compile(
            lambda q, k, mask: base.scaled_dot_product_attention(
                q, k, k, calls[0].cache, SCALE, mask
            )
        )
        ours = [step(call.queries, call.latent, call.mask) for call in calls]
        assert distance(ours, theirs) < 1e-5
    assert stats().routed == 2


# --- what decides


def test_rows_are_cut_in_the_fewest_equal_calls() -> None:
    cut = {rows: calls_for(rows, DEEPSEEK) for rows in (1, 20, 32, 33, 37, 40, 64, 128, 1024)}
    assert cut == {1: 1, 20: 1, 32: 1, 33: 3, 37: 37, 40: 2, 64: 2, 128: 4, 1024: 32}
    assert calls_for(32, Geometry(256, 32)) == 2


@pytest.mark.parametrize(
    ("heads", "least"), [(1, 1.3), (16, 1.6), (20, 1.7), (32, 2.0), (40, 5.9), (64, 11.0)]
)
def test_more_calls_ask_for_more_speed(heads: int, least: float) -> None:
    calls = calls_for(heads, DEEPSEEK)
    assert pays(1e6, least + 0.05, calls, heads // calls, DEEPSEEK)
    assert not pays(1e6, least - 0.05, calls, heads // calls, DEEPSEEK)
    assert not pays(1e6, 1e9, 4, 32, DEEPSEEK)


def test_a_gain_below_what_the_host_pays_is_none() -> None:
    """1K and 16 heads on an H200, dense: 7.2 us, 2.1 times faster than MLX's path."""
    assert not pays(7.2, 2.1, 1, 16, DEEPSEEK)
    assert pays(720, 2.1, 1, 16, DEEPSEEK)


LITTLE = "a plan that gains too little in"


@pytest.mark.parametrize(
    ("policy", "heads", "reason"),
    [
        (Measured(MLX), 16, "the plan is mlx (tuned)"),
        (Measured(Plan("mlx_rows")), 16, "the plan is mlx_rows (tuned)"),
        (Measured(low=None), 16, "a plan that was not measured (tuned)"),
        (Measured(low=1.3), 16, f"{LITTLE} 1 call"),
        (Measured(low=4.0), 64, f"{LITTLE} 2 calls"),
    ],
)
def test_a_plan_that_may_not_pay_is_left(policy: Any, heads: int, reason: str) -> None:
    call = Call(heads)
    theirs = call.run()
    with patch(policy):
        assert distance([call.run(), call.run()], [theirs, theirs]) == 0
    assert stats().reasons == {reason: 2}
    assert (stats().routed, stats().look_ups) == (0, 1)


def test_force_runs_what_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "force")
    with patch(StubPolicy(MLX)):
        Call(128).run()
    assert (stats().routed, stats().stock) == (1, 0)


def test_off_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    stock = base.scaled_dot_product_attention
    install(Measured())
    assert base.scaled_dot_product_attention is stock


HALF = Call(dtype=mx.float16)


@pytest.mark.parametrize(
    ("call", "changed", "reason"),
    [
        (Call(), {"cache": None}, "no cache"),
        (Call(), {"cache": KVCache()}, "a latent that its cache does not hold as it is"),
        (Call(), {"cache": Call(rank=256).cache}, "a latent that its cache does not hold as it is"),
        (Call(), {"cache": OwnCache()}, "a cache of type OwnCache"),
        (Call(q_len=9), {}, "prefill"),
        (Call(rank=128), {}, "a latent of 128 numbers"),
        (Call(), {"mask": None}, "a mask without scores for each head"),
        (Call(), {"mask": mx.ones((1, 200)) > 0}, "a mask without scores for each head"),
        (Call(), {"mask": Call().mask > 0}, "arrays of several dtypes"),
        (Call(), {"mask": HALF.mask}, "arrays of several dtypes"),
        (Call(), {"scale": 1e-6}, "a scale that is unusual"),
        (HALF, {"sinks": mx.zeros(16, mx.float16)}, "attention sinks"),
    ],
)
def test_what_is_not_for_a_kernel_runs_stock_and_is_counted(
    call: Call, changed: dict[str, Any], reason: str
) -> None:
    theirs = call.run(**changed)
    with patch(Measured()):
        ours = call.run(**changed)
    assert distance([ours], [theirs]) == 0
    assert stats().reasons == {reason: 1}


def test_keys_of_every_head_are_no_latent() -> None:
    call = Call(batch=1)
    call.latent = mx.repeat(call.latent, 2, axis=1)
    with patch(Measured()):
        call.run()
    assert stats().reasons == {"keys that are no latent": 1}


def test_an_error_in_routing_is_counted() -> None:
    with patch(Measured()), pytest.raises(TypeError):
        base.scaled_dot_product_attention(None, HALF, HALF, KVCache(), SCALE, None)
    assert stats().reasons == {"AttributeError in routing": 1}


def test_calls_whose_keys_are_not_their_values_are_not_even_counted(deepseek: Any) -> None:
    call, cache = Call(), QuantizedKVCache()
    cache.update_and_fetch(*[mx.ones((1, 1, 4, 64))] * 2)
    with patch(Measured()):
        latent = call.latent
        base.scaled_dot_product_attention(call.queries, latent, latent + 1, None, SCALE, None)
        quantised = cache.update_and_fetch(*[mx.ones((1, 1, 1, 64))] * 2)
        base.scaled_dot_product_attention(mx.ones((1, 4, 1, 64)), *quantised, cache, SCALE, None)
    assert (stats().routed, stats().stock) == (0, 0)


# --- beside classes that are recognised


@pytest.mark.parametrize("policy", [Measured(MLX), Measured()])
def test_a_recognised_class_decides_alone(policy: Any, deepseek: Any) -> None:
    cache = make_prompt_cache(deepseek)
    with patch(policy):
        mx.eval(deepseek(tokens(1, PROMPT), cache=cache))
        mx.eval(deepseek(tokens(1, 1), cache=cache))
        cache = [OwnCache() for _ in cache]
        mx.eval(deepseek(tokens(1, 1), cache=cache))
    counts = stats()
    assert counts.routed + counts.stock == 6
    assert counts.reasons["a cache of type OwnCache"] == 2


@pytest.mark.parametrize("recognised", [True, False])
def test_a_model_in_training_has_its_gradient(
    recognised: bool, request: pytest.FixtureRequest
) -> None:
    if not recognised:
        request.getfixturevalue("unknown")
    model = tiny_model("deepseek_v3")
    model.train(recognised)  # the function can't see it: what it sees is that there is no cache
    attention = attentions(model, KINDS["deepseek_v3"])[0]

    def loss(x: mx.array) -> mx.array:
        return attention(x).sum()

    theirs = mx.grad(loss)(mx.ones((1, 1, 32)))
    with patch(Measured()):
        ours = mx.grad(loss)(mx.ones((1, 1, 32)))
    assert distance([ours], [theirs]) == 0
    assert stats().reasons == {"training mode" if recognised else "no cache": 1}


# --- a plan that fails


def test_a_plan_that_raises_loses_no_step_and_is_not_used_again(
    deepseek: Any,
    unknown: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = 2, padded([3, 0]), (1, 1, 1)
    theirs = decode(deepseek, *case)
    monkeypatch.setattr(routing, "mla_decode", breaking(after=1))
    with patch(Measured()):
        ours = decode(deepseek, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 1
    failed = {"the plan split x2 failed": 1, "the plan split x2 failed before": 4}
    assert stats().reasons == failed
    assert caplog.messages == ["plan split x2 is not used again: no such kernel"]


def test_a_failure_in_a_later_call_of_a_layer_redoes_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Call(64)
    theirs = call.run()
    monkeypatch.setattr(routing, "mla_decode", breaking(after=1))
    with patch(Measured()):
        assert distance([call.run()], [theirs]) == 0
    assert stats().reasons == {"the plan split x2 failed": 1}


def test_a_plan_that_the_back_end_refuses_is_tried_once() -> None:
    call = Call()
    with patch(Measured(Plan("single", tile="of another chip"))):
        call.run()
        call.run()
    assert stats().plans == {"mlx": 1}
    assert stats().reasons == {"the plan single of another chip can't run here": 1}


def test_a_plan_that_failed_for_a_class_is_not_used_by_what_was_decided_before() -> None:
    def broken() -> mx.array:
        raise RuntimeError("no such kernel")

    call, router = Call(), FunctionRouter(Measured())
    asked = call.queries, call.latent, call.cache, SCALE, call.mask, None
    assert router.attend(*asked) is not None
    step = router._look_up(routing.Problem(Span((200,)), 1, 16, mx.float32, DEEPSEEK))
    assert router.attempt(step, broken) is None
    assert router.attend(*asked) is None
    assert router.stats.reasons["the plan split x2 failed before"] == 1


def test_routers_share_what_failed() -> None:
    failed = {StubPolicy().plan}
    router = FunctionRouter(Measured(), failed=failed)
    call = Call()
    assert router.attend(call.queries, call.latent, call.cache, SCALE, call.mask, None) is None
    assert router.stats.reasons == {"the plan split x2 failed before": 1}
