from __future__ import annotations

import random
from itertools import product
from math import exp, log

import pytest

from mla_tuner.evidence import (
    CONFIDENCE,
    MIN_ROUNDS,
    TIE,
    Measurement,
    finalist,
    lost,
    median_interval,
    percentile,
    plainness,
    slower_p,
    verdict,
)
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape

SHAPE = Shape(4096, 1, 16)
SINGLE, SPLIT2, SPLIT4 = Plan("single", 1, "r16"), Plan("split", 2, "r16"), Plan("split", 4, "r16")


def timed(plan: Plan, samples: list[float], mlx: list[float] | None = None) -> Measurement:
    ratios = [a / b for a, b in zip(mlx or [100.0] * len(samples), samples, strict=False)]
    low, high = median_interval(ratios) or (None, None)
    middle = percentile(ratios, 0.5)
    return Measurement(
        *(SHAPE, plan, "ok", "", 1e-3, len(samples), percentile(samples, 0.5), None, None),
        *(middle, low, high, tuple(samples), plan),
    )


def test_an_interval_needs_six_values() -> None:
    assert median_interval([]) is None
    assert median_interval([1.0] * (MIN_ROUNDS - 1)) is None
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_interval(list(range(21))) == (5, 15)  # type: ignore[arg-type]
    assert median_interval(list(range(5000))) == (2430, 2569)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [6, 7, 8, 12, 21, 40])
def test_an_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    rng = random.Random(n)
    hits = 0
    for _ in range(3000):
        interval = median_interval([rng.lognormvariate(0, 1) for _ in range(n)])
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]
    assert hits / 3000 > CONFIDENCE - 0.015


def test_signed_rank_is_exact() -> None:
    for values in ([1.0, -2.0, 3.0], [0.5, 0.7, 0.1, -0.2], [1.0] * 6, [-1.0, -2.0]):
        ranks = range(1, len(values) + 1)
        ordered = sorted(values, key=abs)
        seen = sum(r for r, v in zip(ranks, ordered, strict=True) if v > 0)
        totals = [
            sum(r for r, s in zip(ranks, signs, strict=True) if s)
            for signs in product((0, 1), repeat=len(values))
        ]
        assert slower_p(values) == sum(t >= seen for t in totals) / len(totals)
    assert slower_p([0.0, 0.0]) == slower_p([]) == 1.0
    assert slower_p([0.01] * 6) == 1 / 64


def test_signed_rank_of_many_pairs_agrees_with_the_exact_one() -> None:
    rng = random.Random(3)
    values = [rng.gauss(0.3, 1) for _ in range(25)]
    assert slower_p([*values, 1e-9]) == pytest.approx(slower_p(values), abs=0.02)


def test_percentile() -> None:
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([4.0, 0.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.1) == 1.0


def test_the_fastest_plan_of_full_length_is_the_finalist() -> None:
    found = [
        timed(MLX, [100.0] * 2),
        timed(SINGLE, [20.0] * 10),
        timed(SPLIT2, [10.0] * 10),
        timed(SPLIT4, [5.0] * 2),  # lucky, and out after two rounds: someone else was faster then
        Measurement(SHAPE, Plan("split", 8, "r16"), "wrong", "row error 3"),
    ]
    winner = finalist(found)
    assert winner is not None
    assert winner.plan == SPLIT2


@pytest.mark.parametrize(
    ("behind", "winner"), [(1.0, SPLIT2), (1.019, SPLIT2), (1.03, SPLIT4), (1.2, SPLIT4)]
)
def test_near_ties_go_to_fewer_partitions(behind: float, winner: Plan) -> None:
    found = [timed(MLX, [100.0] * 8), timed(SPLIT4, [10.0] * 8), timed(SPLIT2, [10.0 * behind] * 8)]
    chosen = finalist(found)
    assert chosen is not None
    assert chosen.plan == winner


@pytest.mark.parametrize(("count", "winner"), [(38, 40), (31, 40), (30, 30), (2, 2)])
def test_a_tie_does_not_pay_for_a_few_partitions_less(count: int, winner: int) -> None:
    fewer, leader = Plan("split", count, "r16"), Plan("split", 40, "r16")
    found = [timed(MLX, [100.0] * 8), timed(leader, [10.0] * 8), timed(fewer, [10.15] * 8)]
    chosen = finalist(found)
    assert chosen is not None
    assert chosen.plan.partitions == winner


def test_noise_that_hides_a_small_difference_is_a_tie_but_not_at_any_price() -> None:
    rng = random.Random(0)
    noisy = [rng.uniform(0.9, 1.1) for _ in range(8)]
    for behind, winner in ((1.03, SPLIT2), (1.3, SPLIT4)):
        found = [
            timed(SPLIT4, [10.0] * 8),
            timed(SPLIT2, [10.0 * behind * x for x in noisy]),
        ]
        chosen = finalist(found)
        assert chosen is not None
        assert chosen.plan == winner


def test_among_equal_partitions_the_first_candidate_wins() -> None:
    found = [timed(Plan("mlx_rows"), [10.0] * 8), timed(SINGLE, [10.0] * 8)]
    chosen = finalist(found)
    assert chosen is not None
    assert chosen.plan == Plan("mlx_rows")


def test_nothing_meets_mlx_that_cannot_win() -> None:
    assert finalist([timed(MLX, [10.0] * 8)]) is None
    assert finalist([timed(MLX, [10.0] * 8), timed(SINGLE, [10.1] * 8, [10.0] * 8)]) is None
    assert finalist([timed(MLX, [10.0] * 2), timed(SINGLE, [30.0] * 2, [10.0] * 2)]) is None


def test_verdicts() -> None:
    mlx = timed(MLX, [100.0] * 8)
    fast = timed(SINGLE, [50.0] * 8, [100.0] * 8)
    found = verdict([mlx, fast])
    assert found is not None
    assert found[0].plan == SINGLE
    assert found[1] is mlx
    assert found[2] == "single r16 is 2x mlx [2, 2]"
    for rival, reason in (
        (timed(SINGLE, [98.5] * 8, [100.0] * 8), "not beyond 1.02x for sure"),
        (Measurement(SHAPE, SINGLE, "error", "out of memory"), "in the final duel: out of memory"),
    ):
        found = verdict([mlx, rival])
        assert found is not None
        assert found[0].plan == MLX
        assert reason in found[2]
    found = verdict([mlx])
    assert found is not None
    assert found[2] == "no other plan came close to mlx"
    assert verdict([Measurement(SHAPE, MLX, "error", "no memory"), fast]) is None
    assert verdict([mlx, timed(SINGLE, [50.0] * 5, [100.0] * 5)]) is None
    assert verdict([mlx, Measurement(SHAPE, SINGLE, "timeout", "the budget ended")]) is None
    assert verdict([]) is None


def test_equal_plans_are_hardly_ever_promoted() -> None:
    rng = random.Random(5)
    promoted = found_gain = 0
    for _ in range(1000):
        mlx = [exp(rng.gauss(0, 0.04)) for _ in range(21)]
        promoted += verdict_of(rng, mlx, 1.0) == SINGLE
        found_gain += verdict_of(rng, mlx, 1 / 1.15) == SINGLE
    assert promoted <= 10
    assert found_gain >= 950


def verdict_of(rng: random.Random, mlx: list[float], factor: float) -> Plan:
    plan = [factor * exp(rng.gauss(0, 0.04)) for _ in mlx]
    found = verdict([timed(MLX, mlx), timed(SINGLE, plan, mlx)])
    assert found is not None
    assert log(found[0].median_us or 0) < 1
    return found[0].plan


def test_a_plan_is_lost_when_it_cannot_even_tie() -> None:
    assert lost([1.1] * MIN_ROUNDS)
    assert not lost([1.1] * (MIN_ROUNDS - 1))  # could be luck
    assert not lost([TIE - 0.001] * 30)  # behind for sure, but nobody would notice
    assert not lost([1.1, 0.9] * 10)
    assert not lost([0.9] * 30)


def test_the_finalist_does_not_depend_on_the_order_of_its_rivals() -> None:
    """All of these tie; which one comes out must not change from run to run."""
    plans = [
        *(Plan("split", partitions, tile) for partitions in (2, 4) for tile in ("r8", "r16", "")),
        *(Plan("single", 1, tile) for tile in ("r128", "r16", "r8")),
        Plan("mlx_rows"),
    ]
    rng = random.Random(7)
    for count, wanted in ((10, Plan("mlx_rows")), (9, Plan("single", 1, "r8"))):
        for _ in range(20):
            some = plans[:count]
            rng.shuffle(some)
            found = [
                timed(plan, [10.0 * rng.uniform(1.0, 1.005) for _ in range(8)]) for plan in some
            ]
            chosen = finalist(found)
            assert chosen is not None
            assert chosen.plan == wanted
    assert plainness(SINGLE) < plainness(SPLIT2) < plainness(SPLIT4)


def test_wider_ties_are_for_fewer_partitions_not_for_another_tile() -> None:
    """An interval that reaches the leader is luck of the noise: 3 % are given for less merging."""
    noisy = [0.99, 1.07] * 8

    def behind(plan: Plan, factor: float) -> Measurement:
        return timed(plan, [10.0 * factor * noise for noise in noisy])

    leader = timed(SPLIT2, [10.0] * 16)
    other_tile, fewer = Plan("split", 2, "r8"), SINGLE
    for rivals, wanted in (
        ([behind(other_tile, 1.0)], SPLIT2),
        ([behind(fewer, 1.0)], fewer),
        ([timed(other_tile, [10.04] * 16)], other_tile),
        ([timed(other_tile, [10.1] * 16)], SPLIT2),
    ):
        chosen = finalist([leader, *rivals])
        assert chosen is not None
        assert chosen.plan == wanted
