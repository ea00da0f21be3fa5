"""What tuning a bucket is reckoned to take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fakes import FakeRunners, make_device

from mla_tuner.costs import CALLS, Costs
from mla_tuner.errors import BudgetError
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.tuner import tune

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


@pytest.mark.parametrize("budget_s", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("call_s", [1e-5, 0.1, 5.0])
@pytest.mark.parametrize("check_s", [1e-4, 2.0])  # the estimate does not know of the checks
def test_a_budget_that_is_too_small_is_told_what_would_do(
    store: Store, budget_s: float, call_s: float, check_s: float
) -> None:
    """However it was too small: before the first estimate, by the estimate, or at the verdict."""
    wanted = [replace(SMALL, context=context).bucket for context in (8192, 4096)]
    options = {"check_result": lambda plan: Checked(True, 0.0, "", check_s)}

    def seconds(shape: Shape, plan: Plan) -> float:
        return call_s * shape.context / 4096 * (1.0 if plan == MLX else 0.5)

    tries = 2 if call_s < 1 and check_s < 1 else 6  # each doubles what it doesn't know
    for _ in range(1 + tries):
        runners = FakeRunners(seconds, options=options)
        try:
            assert tune(store, make_device(), wanted, budget_s=budget_s, runners=runners).tuned
            return
        except BudgetError as error:
            told = re.search(r"try --budget (\d+)s, or", str(error))
            assert told
            assert int(told[1]) > budget_s
            budget_s = float(told[1])
    raise AssertionError(f"{budget_s} s was told last, and is too small")
