"""`plan_for`: the decision for a shape with its device, thresholds and reasons."""

from __future__ import annotations

import pytest
from fakes import FakeBackend, make_device
from winners import SPLIT, row

from mla_tuner import policy as policies
from mla_tuner.integrations.vllm_plan import plan_for
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import STEPS, Policy
from mla_tuner.shapes import Shape, bucket_of


def make_policy(**options: object) -> Policy:
    """`single` wins from the bucket of 8192 on, `split` from that of 32768 on, to that of 65536."""
    single = row(8192, Plan("single", 1, "r16"), single_speedup=9.0, split_speedup=1.0)
    split = [row(context, single_speedup=1.0, split_speedup=9.0) for context in (32768, 65536)]
    rows = [each._replace(system="test") for each in (row(4096, MLX), single, *split)]
    return Policy(make_device(), rows, backend=FakeBackend(), system="test", **options)  # type: ignore[arg-type]


def test_a_tuned_shape() -> None:
    answer = plan_for(Shape(32768, 1, 16), make_policy())
    assert answer.decision.plan == SPLIT
    assert answer.partitions == 2
    assert answer.device == make_device().key
    assert answer.decision.reason.startswith("tuned on this device 2026-11-29: split x2 r16 is")
    assert [step.step for step in answer.steps] == ["caller", *STEPS]
    assert [step.step for step in answer.steps if step.answered] == ["tuned"]


def test_thresholds_are_where_the_decision_changes() -> None:
    policy = make_policy()
    thresholds = plan_for(Shape(20000, 1, 16), policy).thresholds
    assert [*thresholds.values()][:3] == ["mlx", "single", "split"]
    for start, path in thresholds.items():
        assert policy.decide(start, 1, 16, "bfloat16").plan.path == path
        if start:
            assert policy.decide(start - 1, 1, 16, "bfloat16").plan.path != path
    (split,) = (start for start, path in thresholds.items() if path == "split")
    assert bucket_of(split, 1, 16, "bfloat16") != bucket_of(split - 1, 1, 16, "bfloat16")


def test_beyond_the_grid_nothing_is_promised() -> None:
    thresholds = plan_for(Shape(4096, 1, 16), make_policy()).thresholds
    assert [*thresholds.items()][-1] == (max(thresholds), "mlx")
    assert max(thresholds) > 1 << 20


def test_a_shape_that_is_not_tuned_says_which_gate_stays_shut() -> None:
    answer = plan_for(Shape(4096, 1, 128), make_policy())
    assert answer.decision.source == "gates"
    assert answer.partitions == 1
    assert "below 32768" in answer.decision.reason
    assert any(line.startswith("long_context: no") for line in answer.steps[-1].details)


def test_a_ragged_batch_counts_by_its_work() -> None:
    even = plan_for(Shape(32768, 1, 16), make_policy())
    ragged = plan_for(Shape(32768, 2, 16, lengths=(32768, 9)), make_policy())
    assert ragged.decision == even.decision


def test_off_is_an_answer_like_any_other() -> None:
    answer = plan_for(Shape(32768, 1, 16), make_policy(off=True))
    assert (answer.decision.plan, answer.decision.source) == (MLX, "off")
    assert answer.thresholds == {0: "mlx"}


def test_its_text_is_one_line_with_all_of_that() -> None:
    text = str(plan_for(Shape(32768, 1, 16), make_policy()))
    assert text.startswith("split x2 r16 on cpu/x86_64-avx2/2c/24gb (tuned: tuned on this device")
    assert "mlx from 0, single from " in text
    assert "\n" not in text


def test_without_a_policy_that_of_the_process_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_current", make_policy())
    assert plan_for(Shape(32768, 1, 16)).decision.plan == SPLIT
