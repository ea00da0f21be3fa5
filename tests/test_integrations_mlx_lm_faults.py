"""A kernel, a policy or a cache that fails in the middle of serving: no step is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models.cache import make_prompt_cache
from serving_steps import (
    BOUND,
    PROMPT,
    StubPolicy,
    breaking,
    breaking_late,
    decode,
    distance,
    padded,
    rotating,
    rotating_batch,
    tokens,
)
from tiny_models import CONFIGS, FULL_CONFIGS, tiny_model

from mla_tuner import ops
from mla_tuner.integrations import routing
from mla_tuner.integrations.mlx_lm import install, patch, stats, uninstall
from mla_tuner.integrations.spans import Span
from mla_tuner.plan import Decision, Plan
from mla_tuner.shapes import DEEPSEEK

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

ROUTES = [
    pytest.param(name, marks=[pytest.mark.slow] * name.startswith("kimi"))  # mx.compile takes long
    for name in (*CONFIGS, *FULL_CONFIGS)
]


@pytest.mark.parametrize("name", ROUTES)
def test_a_plan_that_raises_loses_no_step_and_is_not_used_again(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, case = tiny_model(name), (2, padded([3, 0]), (1, 3, 1, 1))
    theirs = decode(model, *case)
    monkeypatch.setattr(routing, "mla_decode", breaking(after=1))
    with patch(StubPolicy(), absorb=True):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 1
    assert stats().reasons["the plan split x2 failed"] == 1
    layers = stats().reasons["prefill"]
    assert stats().reasons["the plan split x2 failed before"] == layers * len(case[2]) - 2
    lines = [line for line in caplog.messages if "absorbed" not in line]
    assert lines == ["plan split x2 is not used again: no such kernel"]


@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash"])
def test_nor_does_one_that_raises_when_it_is_evaluated(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, case = tiny_model(name), (1, None, (1, 2, 1))
    theirs = decode(model, *case)
    monkeypatch.setattr(routing, "mla_decode", breaking_late)
    with patch(StubPolicy()):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 0
    assert stats().reasons["the plan split x2 failed"] == 1
    (line,) = caplog.messages
    assert line.startswith("plan split x2 is not used again: ")


def test_where_a_graph_is_only_recorded_nothing_is_evaluated(deepseek: Any) -> None:
    router = routing.Router(StubPolicy())
    problem = routing.Problem(Span((64,)), 1, 16, mx.float32, DEEPSEEK)
    step = routing.Step(problem, Decision(Plan("split", 2), "tuned", ""), "")
    compiled = mx.compile(lambda x: router.attempt(step, lambda: x + 1))
    assert compiled(mx.ones(3)).tolist() == [2, 2, 2]
    assert (router.stats.routed, router.stats.reasons) == (1, {})
    assert router._ran == set()  # the next call outside is the first


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("convert", [rotating, rotating_batch([0])])
def test_and_so_it_is_where_each_query_is_a_call(
    convert: Callable[[Any], Any], after: int, deepseek: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = 1, convert, (8, 1)
    theirs = decode(deepseek, *case)
    monkeypatch.setattr(routing, "mla_decode", breaking(after))
    with patch(StubPolicy()):
        ours = decode(deepseek, *case)
    assert distance(ours, theirs) < BOUND
    failed = {"the plan split x2 failed": 1, "the plan split x2 failed before": 3}
    assert stats().reasons == {"prefill": 2, **failed}


def test_it_is_not_used_after_another_install_either(
    deepseek: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing, "mla_decode", breaking(after=0))
    with patch(StubPolicy()):
        decode(deepseek, 1, None, (1,))
        install(StubPolicy())
        decode(deepseek, 1, None, (1,))
    uninstall()
    with patch(StubPolicy()):
        decode(deepseek, 1, None, (1,))
    assert stats().reasons == {"prefill": 2, "the plan split x2 failed before": 2}
    assert caplog.messages == ["plan split x2 is not used again: no such kernel"]


def test_other_plans_go_on(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "mla_decode", breaking(after=0))
    with patch(StubPolicy()):
        decode(deepseek, 1, None, (1,))
        monkeypatch.setattr(routing, "mla_decode", ops.mla_decode)
        stub = StubPolicy(Plan("single"))
        with patch(stub):
            decode(deepseek, 1, None, (1,))
    assert stats().plans == {"single": 2}


def test_a_policy_that_raises_leaves_stock(deepseek: Any) -> None:
    class Broken:
        def decide(self, *asked: Any) -> Decision:
            raise OSError("no table")

    theirs = decode(deepseek, 1, None, (1,))
    with patch(Broken()):
        ours = decode(deepseek, 1, None, (1,))
    assert distance(ours, theirs) == 0
    assert stats().reasons == {"prefill": 2, "OSError in routing": 2}


def test_a_cache_in_another_dtype_is_attended_to_as_in_stock(deepseek: Any) -> None:
    """A prompt cache that was saved by the same model in halves."""

    def steps() -> list[mx.array]:
        cache = make_prompt_cache(deepseek)
        for each in cache:
            latent = mx.random.normal((1, 1, PROMPT, 512), mx.bfloat16, key=mx.random.key(1))
            each.update_and_fetch(latent, latent[..., :64])
        return [deepseek(tokens(1, q_len), cache=cache) for q_len in (1, 4, 1)]

    theirs = steps()
    with patch(StubPolicy()):
        ours = steps()
    assert distance(ours, theirs) < BOUND
    assert stats().reasons == {"a cache that holds other tokens or another dtype": 6}
