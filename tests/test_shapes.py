"""Shapes check themselves, and buckets round to the nearest measured point."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from mla_tuner.shapes import (
    CONTEXT_GRID,
    DEEPSEEK,
    DTYPES,
    GEOMETRIES,
    LAYOUTS,
    MAX_BATCH,
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_Q_LEN,
    Geometry,
    Shape,
    bucket_fields,
    bucket_of,
    effective_batch,
)

GOOD: dict[str, Any] = {"context": 4096, "batch": 1, "heads": 16}
BOUNDS = {
    "context": (0, MAX_CONTEXT),
    "batch": (1, MAX_BATCH),
    "heads": (1, MAX_HEADS),
    "q_len": (1, MAX_Q_LEN),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_counts_have_bounds(name: str) -> None:
    low, high = BOUNDS[name]
    for value in (low, high):
        assert getattr(Shape(**GOOD | {name: value}), name) == value
    for value in (low - 1, high + 1, -(10**30), 10**30):
        with pytest.raises(ValueError, match=rf"^\[Shape\] expected {name} in .*; got -?\d+$"):
            Shape(**GOOD | {name: value})


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [True, 1.0, 1.5, "1", None, [1], float("nan")])
def test_counts_are_ints(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^\[Shape\] expected {name} in .*; got "):
        Shape(**GOOD | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dtype", value) for value in ("", "int8", None, 2, ["float32"])),
        *(("layout", value) for value in ("", "sparse", None, 2, ["paged"])),
        *(("geometry", value) for value in (None, 576, Geometry(512, 32), Geometry(128, 64), ())),
    ],
)
def test_names_are_known_ones(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^\[Shape\] expected {name} in .*; got "):
        Shape(**GOOD | {name: value})


@pytest.mark.parametrize("lengths", [(4096,), (4096, 1, 1), (4095, 1), (4097, 1)])
def test_lengths_fit_batch_and_context(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^\[Shape\] expected 2 lengths with maximum 4096; got "):
        Shape(4096, 2, 16, lengths=lengths)


def test_work_is_counted_over_all_lengths() -> None:
    shape = Shape(100, 2, 3, "float32", q_len=2, lengths=(100, 40))
    assert shape.rows == 6
    assert shape.cache_bytes == 140 * 576 * 4
    assert shape.flop == 2 * 6 * 140 * (576 + 512)
    assert Shape(100, 2, 3).all_lengths == (100, 100)
    assert str(shape) == "context 100 batch 2 heads 3 float32 512+64 paged q_len 2 ragged"


@pytest.mark.parametrize(
    ("lengths", "batch"),
    [((), 1), ((0, 0), 1), ((100,), 1), ((100, 40), 1), ((100, 60), 2), ((100, 1, 1), 1)],
)
def test_a_ragged_batch_counts_by_its_work(lengths: tuple[int, ...], batch: int) -> None:
    assert effective_batch(lengths) == batch


def test_the_grid_is_the_nearest_point_in_log_space() -> None:
    rng = random.Random(0)
    low, high = math.log(CONTEXT_GRID[0]), math.log(CONTEXT_GRID[-1])
    for context in [round(math.exp(rng.uniform(low, high))) for _ in range(2000)]:
        nearest = min(CONTEXT_GRID, key=lambda point: abs(math.log(point / context)))
        assert bucket_of(context, 1, 16, "bfloat16").context == nearest


@pytest.mark.parametrize(
    ("context", "bucket"),
    [
        *((value, 0) for value in (-(10**30), -1, 0, 886, 1284239, 10**30)),
        *((value, value) for value in CONTEXT_GRID),
        *((887, 1024), (1284238, 1 << 20)),
    ],
)
def test_outside_the_grid_there_is_no_bucket(context: int, bucket: int) -> None:
    assert bucket_of(context, 1, 16, "bfloat16").context == bucket


@pytest.mark.parametrize(
    ("batch", "rounded"),
    [(-5, 1), (0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (256, 256), (257, 256), (400, 512)],
)
def test_batches_are_powers_of_two(batch: int, rounded: int) -> None:
    assert bucket_of(4096, batch, 16, "bfloat16").batch == rounded


def test_a_bucket_is_its_own_bucket() -> None:
    """What is stored for a bucket is found again by the shape that was measured for it."""
    for context in CONTEXT_GRID:
        for geometry in GEOMETRIES:
            for layout in LAYOUTS:
                for dtype in DTYPES:
                    bucket = bucket_of(context, 2, 16, dtype, geometry, 2, layout)
                    assert bucket.shape.bucket == bucket
                    assert bucket.geometry == geometry


def test_a_plain_tuple_is_the_same_key() -> None:
    fields = (32000, 3, 20, "float16", DEEPSEEK, 2, "dense")
    bucket = bucket_of(*fields[:4], fields[4], fields[5], fields[6])
    assert bucket == bucket_fields(*fields)
    assert hash(bucket) == hash(bucket_fields(*fields))
