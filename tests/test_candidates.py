from __future__ import annotations

import pytest
from fakes import FakeBackend, make_device

from mla_tuner.candidates import (
    KAPPA,
    busy,
    candidates,
    fill,
    law,
    partition_counts,
    prior,
)
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import CONTEXT_GRID, MAX_PARTITIONS, Shape, bucket_of, piece_tokens, pieces


@pytest.mark.parametrize("cores", [1, 2, 8, 80, 132, None])
@pytest.mark.parametrize("heads", [1, 3, 16, 20, 128])
@pytest.mark.parametrize("context", [1024, 1536, 32768, 1 << 20])
def test_every_candidate_is_legal_and_named_once(
    cores: int | None, heads: int, context: int
) -> None:
    shape = Shape(context, 2, heads)
    plans = candidates(shape.bucket, make_device(cores), FakeBackend())
    assert plans[:2] == [MLX, Plan("mlx_rows")]
    assert len(plans) == len(set(plans))
    assert {p.tile for p in plans if p.path == "single"} == {"r16", "r32"}
    for plan in plans:
        assert pieces(context, plan.partitions) == plan.partitions
    costs = [prior(plan, shape, cores) for plan in plans[2:]]
    assert costs == sorted(costs)


def test_split_into_two_is_always_tried() -> None:
    for context in CONTEXT_GRID:
        shape = Shape(context, 64, 128)
        assert 2 in partition_counts(shape, 2, "r16")


def pieces_of(shape: Shape) -> list[int]:
    """Counts that its context can be cut in."""
    counts = range(2, MAX_PARTITIONS + 1)
    return [count for count in counts if pieces(shape.context, count) == count]


def test_counts_grow_with_the_machine() -> None:
    shape = Shape(1 << 20, 1, 16)
    assert partition_counts(shape, 2, "r16") == [2, 3, 4, 5, 6, 7, 8, 16]
    assert partition_counts(shape, 132, "r16") == pieces_of(shape)


def test_without_a_kernel_only_mlx_is_left() -> None:
    plans = candidates(Shape(4096, 1, 16).bucket, make_device(), FakeBackend(reason="not built"))
    assert plans == [MLX, Plan("mlx_rows")]


def test_refused_plans_are_left_out() -> None:
    refused = Plan("split", 2, "r16")
    plans = candidates(Shape(4096, 1, 16).bucket, make_device(), FakeBackend(refused=(refused,)))
    assert refused not in plans
    assert Plan("split", 2, "r32") in plans


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 100, 1024, 4097, 40000])
def test_pieces_cover_the_context(context: int) -> None:
    for partitions in range(1, MAX_PARTITIONS + 1):
        count, length = pieces(context, partitions), piece_tokens(context, partitions)
        assert 1 <= count <= partitions
        assert length % 64 == 0
        assert (count - 1) * length < max(context, 1) <= count * length
        assert pieces(context, count) == count


def test_prior_splits_a_long_context_on_an_idle_machine() -> None:
    shape = Shape(1 << 17, 1, 16)
    best = candidates(shape.bucket, make_device(80), FakeBackend())[2]
    assert best.path == "split"
    assert best.partitions > 16


def test_prior_leaves_a_busy_machine_alone() -> None:
    shape = Shape(1 << 17, 32, 128)
    assert candidates(shape.bucket, make_device(2), FakeBackend())[2].path == "single"


@pytest.mark.parametrize(("context", "best"), [(2048, 32), (8192, 64), (32768, 128)])
def test_the_law_gives_what_was_best_on_an_h200(context: int, best: int) -> None:
    """Measured 2026-11-29, driver 580.159.04: 16 heads of bfloat16, batch 1, 132 cores."""
    wanted = law(KAPPA, bucket_of(context, 1, 16, "bfloat16"), "r16", 132)
    assert wanted == pytest.approx(best, rel=0.02)


def test_fill_counts_the_last_wave_and_the_last_piece() -> None:
    assert fill(32768, 8, 1, 8) == 1.0
    assert fill(32768, 9, 1, 8) == pytest.approx(0.561, abs=1e-3)  # two waves of 3648 tokens
    assert fill(32768, 4, 1, 8) == 0.5
    assert fill(1000, 2, 1, 2) == pytest.approx(1000 / 1024)


def test_busy_is_good_for_one_and_for_two_tasks_a_core() -> None:
    assert busy(1 << 20, 16, 1, 8) == 1.0
    assert busy(1 << 20, 8, 1, 8) == 0.5  # half of the places where cores take two
    assert busy(1 << 20, 12, 1, 8) == pytest.approx(0.75, abs=0.01)
