"""A plan can't be made wrong: every field is checked for its type and against the others."""

from __future__ import annotations

from typing import Any

import pytest

from mla_tuner.plan import MLX, NATIVE_PATHS, PATHS, Plan
from mla_tuner.shapes import MAX_PARTITIONS


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (MLX, "mlx"),
        (Plan("mlx_rows"), "mlx_rows"),
        (Plan("single"), "single"),
        (Plan("single", 1, "r16"), "single r16"),
        (Plan("split", 2), "split x2"),
        (Plan("split", MAX_PARTITIONS, "r128"), "split x256 r128"),
    ],
)
def test_legal_plans_have_a_short_text(plan: Plan, text: str) -> None:
    assert str(plan) == text
    assert plan.native == (plan.path in NATIVE_PATHS)


def test_equal_plans_are_one_key() -> None:
    assert len({Plan("split", 2, "r16"), Plan("split", 2, "r16"), Plan("split", 2)}) == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("partitions", [-1, 0, 1, 2, MAX_PARTITIONS, MAX_PARTITIONS + 1, 10**30])
def test_partitions_go_with_the_path(path: str, partitions: int) -> None:
    if partitions in range(2, MAX_PARTITIONS + 1) if path == "split" else partitions == 1:
        assert Plan(path, partitions).partitions == partitions
    else:
        with pytest.raises(ValueError, match=r"^\[Plan\] expected partitions in .*; got "):
            Plan(path, partitions)


@pytest.mark.parametrize("path", ["", "warp", "MLX", None, 1, b"mlx", ["mlx"], ("mlx",), {}])
def test_unknown_paths_are_refused(path: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[Plan\] expected path in .*; got "):
        Plan(path)


@pytest.mark.parametrize("path", ["single", "split"])
@pytest.mark.parametrize("partitions", [True, 1.0, 2.0, 2.5, "4", None, [2], float("nan")])
def test_partitions_are_an_int(path: str, partitions: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[Plan\] expected partitions in .*; got "):
        Plan(path, partitions)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tile", [None, 16, True, b"r16", ["r16"], ()])
def test_tiles_are_text(path: str, tile: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[Plan\] expected tile as text; got "):
        Plan(path, 2 if path == "split" else 1, tile)


@pytest.mark.parametrize("path", ["mlx", "mlx_rows"])
def test_only_kernels_have_tiles(path: str) -> None:
    with pytest.raises(ValueError, match=r"^\[Plan\] expected no tile for path .*; got 'r16'"):
        Plan(path, 1, "r16")


@pytest.mark.parametrize(("context", "ran"), [(0, 1), (64, 1), (65, 2), (300, 5), (4096, 8)])
def test_short_contexts_are_cut_in_fewer_pieces(context: int, ran: int) -> None:
    expected = Plan("split", 8, "r16").cut(context)
    assert expected == Plan("split" if ran > 1 else "single", ran, "r16")
    assert MLX.cut(context) == MLX
