"""The JSON values that the commands answer with."""

from __future__ import annotations

import json
import math

import pytest
from fakes import make_device

from mla_tuner import answers
from mla_tuner.plan import MLX, Decision, Plan
from mla_tuner.policy import Step
from mla_tuner.shapes import Geometry, Shape


def test_plan_has_exactly_the_promised_keys() -> None:
    decision = Decision(Plan("split", 4, "r16"), "tuned", "because", 17.2, 112.0, 108.0, 118.0)
    answer = answers.plan_answer(decision, make_device())
    assert list(answer) == [
        *("path", "partitions", "tile", "source", "reason"),
        *("expected_us", "speedup", "speedup_low", "speedup_high", "baseline", "device"),
    ]
    assert answers.plan_of(answer) == decision.plan
    assert answers.plan_answer(Decision(MLX, "off", "off"), make_device())["speedup"] is None
    steps = [Step("tuned", True, "because", ("a number",))]
    assert json.loads(json.dumps(answers.plan_answer(decision, make_device(), steps)))["steps"] == [
        {"step": "tuned", "answered": True, "reason": "because", "details": ["a number"]}
    ]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape(32768, 1, 16), "32K b1 h16 bf16"),
        (Shape(1 << 20, 8, 128, "float32"), "1M b8 h128 fp32"),
        (Shape(1536, 1, 3, "float16", q_len=2, layout="dense"), "1536 b1 h3 fp16 q2 dense"),
        (Shape(1024, 1, 3, geometry=Geometry(256, 32)), "1K b1 h3 bf16 256+32"),
        (Shape(0, 1, 3), "0 b1 h3 bf16"),
    ],
)
def test_short(shape: Shape, text: str) -> None:
    assert answers.short(shape) == text


def test_finite() -> None:
    value = {"a": [1.5, math.inf, {"b": math.nan}], "c": (None, "inf", 3)}
    assert answers.finite(value) == {"a": [1.5, None, {"b": None}], "c": [None, "inf", 3]}
    json.dumps(answers.finite(value), allow_nan=False)
