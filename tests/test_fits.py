from __future__ import annotations

import pytest

from mla_tuner.fits import Threshold, between, law, threshold
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Bucket, bucket_of

SINGLE = Plan("single", 1, "r16")


def split(partitions: int) -> Plan:
    return Plan("split", partitions, "r16")


def bucket(context: int) -> Bucket:
    return bucket_of(context, 1, 16, "bfloat16")


def test_thresholds_are_where_wins_begin_to_hold() -> None:
    winners = {1024: MLX, 2048: SINGLE, 4096: MLX, 8192: SINGLE, 16384: split(4), 32768: split(4)}
    found = threshold({bucket(c): plan for c, plan in winners.items()}, 2)
    assert (found.native_from, found.split_from) == (8192, 16384)
    assert found.kappa is not None


def test_without_wins_there_is_no_threshold() -> None:
    assert threshold({bucket(1024): MLX}, 2) == Threshold(None, None, None)
    assert threshold({bucket(1024): split(2), bucket(4096): MLX}, 2).split_from is None
    assert threshold({bucket(1024): SINGLE}, None) == Threshold(1024, None, None)


def test_the_constant_gives_the_winners_back() -> None:
    winners = {bucket(c): split(p) for c, p in ((4096, 2), (16384, 4), (65536, 8))}
    kappa = threshold(winners, 8).kappa
    assert kappa is not None
    for one, plan in winners.items():
        assert law(kappa, one, "r16", 8) == pytest.approx(plan.partitions)
    wider = bucket_of(4096, 1, 32, "bfloat16")  # twice the row groups: half the partitions
    assert law(kappa, wider, "r16", 8) == pytest.approx(1.0)


def test_between_hits_both_ends_and_stays_inside() -> None:
    low, high = (1024, split(2)), (65536, split(16))
    assert between(1024, low, high) == split(2)
    assert between(65536, low, high) == split(16)
    counts = []
    for context in (1536, 2048, 4096, 8192, 24576, 49152):
        plan = between(context, low, high)
        assert plan is not None
        counts.append(plan.partitions)
    assert counts == sorted(counts)
    assert 2 <= counts[0] <= counts[-1] <= 16


def test_between_takes_the_tile_of_the_nearer_end() -> None:
    low, high = (1024, Plan("single", 1, "r16")), (65536, Plan("single", 1, "r32"))
    assert between(2048, low, high) == Plan("single", 1, "r16")
    assert between(32768, low, high) == Plan("single", 1, "r32")
    assert between(4096, (1024, MLX), (8192, MLX)) == MLX


def test_between_different_paths_nothing_is_known() -> None:
    assert between(2048, (1024, MLX), (4096, SINGLE)) is None
    assert between(2048, (1024, SINGLE), (4096, split(2))) is None
