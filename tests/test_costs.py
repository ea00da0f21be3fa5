"""What tuning a bucket is reckoned to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeRunners

from mla_tuner.costs import CALLS, Costs
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

SMALL = Shape(1024, 1, 16)
LARGE = replace(SMALL, context=1 << 18, batch=32)
TIMES = LARGE.flop / SMALL.flop


def test_only_the_calls_of_mlx_grow_with_the_operations() -> None:
    """A GPU's small call is all latency: with the search scaled as well, a bucket of seconds was
    said to need days.
    """
    costs = Costs(FakeRunners(lambda shape, plan: 0.0))
    costs.add(SMALL, 3.0, 80e-6)
    assert costs.estimate(SMALL) == pytest.approx(3.0)
    assert costs.estimate(LARGE) == pytest.approx(3.0 + CALLS * 80e-6 * (TIMES - 1))


def test_where_mlx_takes_nearly_all_of_it_everything_grows() -> None:
    costs = Costs(FakeRunners(lambda shape, plan: 0.0))
    costs.add(SMALL, 9.0, 1.0)  # the slack of CALLS was not needed
    assert costs.estimate(LARGE) == pytest.approx(9.0 * TIMES)


def test_the_nearest_shape_counts_of_the_same_dtype_where_there_is_one() -> None:
    costs = Costs(FakeRunners(lambda shape, plan: 0.0))
    half = replace(SMALL, dtype="float16")
    for shape, seconds in ((SMALL, 1.0), (LARGE, 50.0), (half, 2.0)):
        costs.add(shape, seconds, 0.0)
    assert costs.estimate(replace(LARGE, batch=16)) == pytest.approx(50.0)
    assert costs.estimate(replace(LARGE, dtype="float16")) == pytest.approx(2.0)


def test_before_anything_is_known_mlx_is_tried_once_on_a_short_context() -> None:
    runners = FakeRunners(lambda shape, plan: 1e-6 * shape.context)
    costs = Costs(runners)
    assert costs.estimate(replace(SMALL, context=4096)) == pytest.approx(4 * CALLS * 1.024e-3)
    costs.estimate(SMALL)
    assert runners.made == [SMALL]


def test_a_trial_that_fails_costs_nothing() -> None:
    def fails(shape: Shape, plan: Plan) -> float:
        raise RuntimeError("no memory")

    assert Costs(FakeRunners(fails)).estimate(LARGE) == 0.0
