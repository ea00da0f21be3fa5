"""The probe inputs, the float64 truth, and the check: they must find what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner import DenseCache, PagedCache, backends
from mla_tuner.backends.mlx_paths import MlxBackend
from mla_tuner.cases import (
    LSE_TOLERANCE,
    MLX_TOLERANCE,
    TOLERANCE,
    WILD_BLOCK,
    Case,
    Pool,
    check,
    conformance_subset,
    make_case,
    reference,
)
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import DEEPSEEK, DTYPES, GEOMETRIES, Shape

SINGLE = Plan("single")
RAGGED = Shape(70, 3, 2, "float32", q_len=2, lengths=(70, 0, 33))


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def attended(case: Case, b: int) -> np.ndarray:
    """Tokens of one sequence, gathered one by one."""
    cache, geometry = case.cache, case.shape.geometry
    if isinstance(cache, PagedCache):
        latent, table = numpy(cache.latent), np.array(cache.block_tables)
        size = latent.shape[1]
        slots = [latent[table[b, t // size], t % size] for t in range(cache.lengths[b])]
    else:
        parts = [cache.latent] if cache.k_pe is None else [cache.latent, cache.k_pe]
        whole = np.concatenate([numpy(part) for part in parts], axis=-1)[b, 0]
        start = cache.starts[b] if cache.starts is not None else 0
        slots = [whole[t] for t in range(start, cache.lengths[b])]
    return np.array(slots).reshape(-1, geometry.width)


def one_by_one(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The definition, row by row, without tricks."""
    shape, rank = case.shape, case.shape.geometry.kv_lora_rank
    out, lse = np.zeros(case.q_nope.shape), np.full(case.q_nope.shape[:3], -np.inf)
    parts = [case.q_nope] if case.q_pe is None else [case.q_nope, case.q_pe]
    query = np.concatenate([numpy(part) for part in parts], axis=-1).astype(np.float64)
    for b, h, j in np.ndindex(*lse.shape):
        tokens = attended(case, b).astype(np.float64)
        tokens = tokens[: max(0, len(tokens) - shape.q_len + 1 + j)]
        if len(tokens):
            weights = np.exp(tokens @ query[b, h, j] * case.scale)
            out[b, h, j] = weights @ tokens[:, :rank] / weights.sum()
            lse[b, h, j] = np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_the_reference_is_the_definition(
    dtype: str, geometry: tuple[int, int], layout: str
) -> None:
    shape = replace(RAGGED, dtype=dtype, geometry=geometry, layout=layout)
    starts = (3, 1, 0) if layout == "dense" else None
    case = make_case(shape, starts=starts, strided=True, block_size=16)
    want, want_lse = one_by_one(case)
    out, lse = reference(case)
    np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-9)


def test_the_reference_of_some_rows() -> None:
    case = make_case(RAGGED)
    out, lse = reference(case)
    some, some_lse = reference(case, [3, 0])
    # rows are heads x q_len: row 3 is head 1, query 1
    np.testing.assert_array_equal(some, np.stack([out[:, 1, 1], out[:, 0, 0]], axis=1))
    np.testing.assert_array_equal(some_lse, np.stack([lse[:, 1, 1], lse[:, 0, 0]], axis=1))


def test_long_contexts_are_summed_by_chunks() -> None:
    case = make_case(Shape(9001, 1, 2, "float32", layout="dense"))
    want, want_lse = one_by_one(case)
    out, lse = reference(case)
    np.testing.assert_allclose(out, want, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-10)


@pytest.mark.parametrize("q_len", [1, 8])
def test_tokens_that_are_there_more_than_once_count_as_often(q_len: int) -> None:
    shape = Shape(1000, 3, 2, "float32", q_len=q_len, lengths=(1000, 9, 777))
    case = make_case(shape, block_size=8, distinct=240)
    want, want_lse = one_by_one(case)
    out, lse = reference(case)
    np.testing.assert_allclose(out, want, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-10)


def test_a_long_case_holds_as_many_tokens_as_it_is_told() -> None:
    cache = make_case(Shape(8192, 4, 2), distinct=2048).cache
    assert isinstance(cache, PagedCache)
    assert cache.latent.shape[0] * 32 <= 2048 + 64
    table = np.asarray(cache.block_tables)[:, :256].tolist()
    assert all(len(set(row)) > 8 for row in table)
    assert all(row.count(row[-1]) == 1 for row in table)  # it may end half way
    whole, few = make_case(Shape(512, 2, 2)).cache, make_case(Shape(512, 2, 2), distinct=2048).cache
    np.testing.assert_array_equal(
        np.asarray(whole.latent.view(mx.uint16)), np.asarray(few.latent.view(mx.uint16))
    )


# --- inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_moderate_and_every_seed_differs(dtype: str) -> None:
    one, same, other = (make_case(Shape(64, 1, 8, dtype), seed=seed) for seed in (1, 1, 2))
    values = numpy(one.q_nope)
    assert 0.125 <= np.abs(values).min() <= np.abs(values).max() < 2
    assert abs(values.mean()) < 0.1
    assert 0.7 < values.std() < 1.1
    assert mx.array_equal(one.q_nope, same.q_nope)
    assert not mx.array_equal(one.q_nope, other.q_nope)
    large = make_case(Shape(64, 1, 8, dtype), seed=1, logit_scale=30.0)
    np.testing.assert_allclose(numpy(large.q_nope), 30 * values, rtol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_unused_slot_of_a_page_is_poisoned(dtype: str) -> None:
    case = make_case(replace(RAGGED, dtype=dtype), block_size=16)
    assert isinstance(case.cache, PagedCache)
    table, latent = np.array(case.cache.block_tables), numpy(case.cache.latent)
    used = np.zeros(latent.shape[:2], bool)
    for row, length in zip(table, case.cache.lengths, strict=True):
        pages = -(-length // 16)
        assert (row[pages:] == WILD_BLOCK).all()
        assert len(row) > pages
        for token in range(length):
            used[row[token // 16], token % 16] = True
    assert used.sum() == sum(case.cache.lengths)
    assert np.isfinite(latent[used]).all()
    assert np.isnan(latent[~used]).all()


@pytest.mark.parametrize("strided", [False, True])
def test_every_unused_slot_of_a_buffer_is_poisoned(strided: bool) -> None:
    shape, starts = replace(RAGGED, layout="dense"), (0, 7, 20)
    case = make_case(shape, starts=starts, strided=strided)
    assert isinstance(case.cache, DenseCache)
    assert case.cache.lengths == (70, 7, 53)
    for array in (case.cache.latent, case.cache.k_pe):
        assert array is not None
        values = numpy(array)[:, 0]
        for row, start, length in zip(values, starts, case.cache.lengths, strict=True):
            assert np.isfinite(row[start:length]).all()
            assert np.isnan(row[:start]).all()
            assert np.isnan(row[length:]).all()
    strides = np.asarray(case.cache.latent).strides
    assert (strides[0] == 70 * 512 * 4) is not strided


def test_poison_can_be_left_out() -> None:
    case = make_case(RAGGED, poison=False)
    assert isinstance(case.cache, PagedCache)
    assert np.isfinite(numpy(case.cache.latent)).all()
    assert np.array(case.cache.block_tables).max() < case.cache.latent.shape[0]


# --- the check


def truth(case: Case) -> tuple[mx.array, mx.array]:
    out, lse = reference(case)
    return mx.array(out.astype(np.float32)), mx.array(lse.astype(np.float32))


def shifted(array: mx.array, by: float, at: Sequence[int]) -> mx.array:
    values = np.array(array)
    values[tuple(at)] += by
    return mx.array(values)


def test_rows_are_picked_before_anything_is_computed_of_them() -> None:
    case = make_case(RAGGED)
    out, lse = reference(case)
    spoilt = out.copy()
    spoilt[:, 0, 0] = np.nan
    got = mx.array(spoilt.astype(np.float32))
    rows = list(range(1, RAGGED.rows))
    assert check(case, got, mx.array(lse.astype(np.float32)), Plan("single"), rows).ok
    assert not check(case, got, mx.array(lse.astype(np.float32)), Plan("single"), [0]).ok


def test_the_truth_passes() -> None:
    case = make_case(RAGGED)
    out, lse = truth(case)
    found = check(case, out, lse, SINGLE)
    assert (found.ok, found.reason) == (True, "")
    assert found.max_error < 1e-6
    assert check(case, out, None, SINGLE).ok
    assert check(case, out, lse, SINGLE, rows=[0, 2]).ok


def test_one_wrong_row_is_found() -> None:
    case = make_case(RAGGED)
    out, lse = truth(case)
    norm = float(np.linalg.norm(np.array(out)[0, 1, 0]))
    wrong = shifted(out, 2 * TOLERANCE["float32"] * norm, (0, 1, 0, 5))
    found = check(case, wrong, lse, SINGLE)
    assert not found.ok
    assert found.reason == "row error 2.00e-05 exceeds 1.0e-05"
    assert check(case, wrong, lse, SINGLE, rows=[0]).ok  # it is row 2
    assert check(case, wrong, lse, MLX).ok  # MLX's paths have their own bound
    much = shifted(out, 2 * MLX_TOLERANCE["float32"] * norm, (0, 1, 0, 5))
    assert not check(case, much, lse, MLX).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-3])
def test_numbers_where_nothing_is_attended_are_found(value: float) -> None:
    case = make_case(RAGGED)
    out, lse = truth(case)
    assert not check(case, shifted(out, value, (1, 0, 0, 0)), lse, SINGLE).ok
    assert not check(case, out, mx.where(mx.isinf(lse), value, lse), SINGLE).ok


def test_a_wrong_lse_is_found() -> None:
    case = make_case(RAGGED)
    out, lse = truth(case)
    for by, ok in ((LSE_TOLERANCE / 2, True), (LSE_TOLERANCE * 2, False), (np.nan, False)):
        assert check(case, out, shifted(lse, by, (0, 0, 1)), SINGLE).ok is ok
    assert "-inf" in check(case, out, mx.zeros_like(lse), SINGLE).reason


def test_wrong_shapes_are_found() -> None:
    case = make_case(RAGGED)
    out, lse = truth(case)
    assert check(case, out[:, :1], lse, SINGLE).reason.startswith("output shape")
    assert check(case, out, lse[:, :1], SINGLE).reason.startswith("LSE shape")


def test_only_large_scores_are_allowed_more() -> None:
    """The table's bound is the bound wherever scores are those of a model."""
    for factor, allowed in ((1.0, False), (30.0, True)):
        case = make_case(Shape(70, 1, 1, "float32"), logit_scale=factor)
        out, lse = truth(case)
        wrong = out * (1 + 3 * TOLERANCE["float32"])
        assert check(case, wrong, lse, SINGLE).ok is allowed
        assert not check(case, out * 1.001, lse, SINGLE).ok


# --- the pool


@pytest.mark.parametrize("layout", ["paged", "dense"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_cases_of_a_ring_share_no_memory(geometry: tuple[int, int], layout: str) -> None:
    pool = Pool("float16", geometry, 2 << 20)  # type: ignore[arg-type]
    shape = Shape(100, 2, 5, "float16", geometry, layout=layout, lengths=(100, 60))  # type: ignore[arg-type]
    ring = pool.ring(shape)
    assert ring >= 3
    cases = [pool.case(shape, k) for k in range(ring)]
    rows = [row.tobytes() for case in cases for b in (0, 1) for row in attended(case, b)]
    assert len(set(rows)) == len(rows) == ring * 160
    assert mx.array_equal(pool.case(shape, ring).cache.latent, cases[0].cache.latent)
    for case in cases[:2]:
        want, _ = one_by_one(case)
        np.testing.assert_allclose(reference(case)[0], want, rtol=1e-9)


@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_a_pool_is_not_copied(layout: str) -> None:
    pool = Pool("bfloat16", DEEPSEEK, 32 << 20)
    shape = Shape(8192, 1, 16, layout=layout)
    before = mx.get_active_memory()
    kept = [pool.case(shape, k) for k in range(3)]
    assert mx.get_active_memory() - before < 1 << 20
    assert len(kept) == pool.ring(shape) == 3


def test_a_large_pool_repeats_its_numbers_and_not_its_memory() -> None:
    pool = Pool("bfloat16", DEEPSEEK, 150 << 20)
    assert pool.tokens == (150 << 20) // (64 * 1152) * 64
    assert pool._rows.shape == (pool.tokens, 576)
    rows = np.asarray(pool._rows.view(mx.uint16))
    piece = (64 << 20) // (64 * 1152) * 64
    np.testing.assert_array_equal(rows[:100], rows[piece : piece + 100])
    assert rows[-1].any()


def test_a_pool_refuses_what_it_cannot_serve() -> None:
    pool = Pool("bfloat16", DEEPSEEK, 1 << 20)
    with pytest.raises(ValueError, match=r"expected bfloat16 512\+64; got float16 512\+64"):
        pool.case(Shape(10, 1, 1, "float16"), 0)
    assert pool.ring(Shape(4096, 1, 1)) == 0
    with pytest.raises(ValueError, match="expected at most 896 tokens; got context 4096"):
        pool.case(Shape(4096, 1, 1), 0)
    assert pool.case(Shape(0, 1, 1), 0).cache.lengths == (0,)


# --- the shared conformance subset


@pytest.mark.usefixtures("kernel")
def test_the_subset_is_small_and_reaches_every_variant() -> None:
    found = list(conformance_subset(backends.get("cpu")))
    assert 30 <= len(found) <= 300
    assert {plan.path for _, _, plan in found} == {"mlx", "mlx_rows", "single", "split"}
    assert {plan.tile for _, _, plan in found} == {"", "r16", "r32", "r64", "r128"}
    assert {case.shape.dtype for _, case, _ in found} == set(DTYPES)
    assert {case.shape.geometry for _, case, _ in found} == set(GEOMETRIES)


def test_the_subset_without_kernels_has_mlx_paths() -> None:
    found = list(conformance_subset(MlxBackend("cuda")))
    assert {plan.path for _, _, plan in found} == {"mlx", "mlx_rows"}
