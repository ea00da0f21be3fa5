"""MLX's own paths: what engines run, bit for bit, and never a step outside the cache."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner import DenseCache, PagedCache, backends, mla_decode
from mla_tuner.backends.mlx_paths import MlxBackend
from mla_tuner.cases import Case, check, make_case
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape


def stock(case: Case) -> mx.array:
    """What mlx-lm's absorbed models compute for one token."""
    assert isinstance(case.cache, DenseCache)
    assert case.cache.k_pe is not None
    assert case.q_pe is not None
    latent, k_pe = case.cache.latent, case.cache.k_pe
    mask = (case.q_pe * case.scale) @ k_pe.swapaxes(-1, -2)
    attention = mx.fast.scaled_dot_product_attention
    return attention(case.q_nope, latent, latent, scale=case.scale, mask=mask)


@pytest.mark.parametrize("batch", [1, 3])
def test_mlx_is_exactly_what_engines_run(batch: int) -> None:
    case = make_case(Shape(100, batch, 16, layout="dense"), strided=True)
    out = mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=MLX)
    assert mx.array_equal(out, stock(case))


MLX_PATHS = [MLX, Plan("mlx_rows")]


@pytest.mark.parametrize("plan", MLX_PATHS, ids=str)
@pytest.mark.parametrize("lengths", [(100, 100, 100), (100, 60, 100)], ids=["one batch", "ragged"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("bad", [-1, -(1 << 31), 0, 1, 1000, 2_000_000_000, (1 << 31) - 1])
def test_a_block_id_of_no_block_is_never_followed(
    bad: int, q_len: int, lengths: tuple[int, ...], plan: Plan
) -> None:
    """NaN for its sequence, and for no other; the id itself would be read from foreign memory."""
    case = make_case(Shape(100, 3, 5, "float32", q_len=q_len, lengths=lengths))
    assert isinstance(case.cache, PagedCache)
    blocks = case.cache.latent.shape[0]
    bad = bad + blocks if bad in (0, 1) else bad  # the first ids beyond the last
    table = np.array(case.cache.block_tables)
    table[1, 1] = bad
    cache = replace(case.cache, block_tables=mx.array(table))
    want, want_lse = decode(case, case.cache, plan)
    out, lse = decode(case, cache, plan)
    for b in (0, 2):
        assert mx.array_equal(out[b], want[b])
        assert mx.array_equal(lse[b], want_lse[b])
    assert mx.isnan(out[1]).all()
    assert mx.isnan(lse[1]).all()


@pytest.mark.parametrize("plan", MLX_PATHS, ids=str)
def test_block_ids_past_the_end_do_not_matter(plan: Plan) -> None:
    case = make_case(Shape(100, 2, 5, "float32", lengths=(100, 30)))
    assert isinstance(case.cache, PagedCache)
    table = np.array(case.cache.block_tables)
    table = np.concatenate([table, np.full_like(table, -1)], axis=1)
    table[1, 1:] = 2_000_000_000
    want, _ = decode(case, case.cache, plan)
    # Every second column of a wider table: ids need not lie side by side.
    wide = mx.array(np.repeat(table, 2, axis=1))[:, ::2]
    for tables in (mx.array(table), wide):
        out, lse = decode(case, replace(case.cache, block_tables=tables), plan)
        assert mx.array_equal(out, want)
        assert check(case, out, lse, plan).ok


def decode(case: Case, cache: PagedCache, plan: Plan) -> tuple[mx.array, mx.array]:
    return mla_decode(case.q_nope, case.q_pe, cache, scale=case.scale, plan=plan, return_lse=True)


def stock_paged(case: Case) -> mx.array:
    """What vllm-metal computes for one token: gather, then attention; ids are taken on trust."""
    assert isinstance(case.cache, PagedCache)
    assert case.q_pe is not None
    blocks = case.cache.latent[case.cache.block_tables[:, : -(-case.shape.context // 32)]]
    tokens = blocks.reshape(blocks.shape[0], 1, -1, 576)[:, :, : case.shape.context]
    latent, k_pe = tokens[..., :512], tokens[..., 512:]
    mask = (case.q_pe * case.scale) @ k_pe.swapaxes(-1, -2)
    attention = mx.fast.scaled_dot_product_attention
    return attention(case.q_nope, latent, latent, scale=case.scale, mask=mask)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_looking_at_block_ids_changes_no_bit(dtype: str) -> None:
    case = make_case(Shape(100, 3, 16, dtype))
    assert isinstance(case.cache, PagedCache)
    assert mx.array_equal(decode(case, case.cache, MLX)[0], stock_paged(case))


def test_equal_lengths_run_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop over sequences where none is needed: the measured baseline must not be slowed."""
    calls = []
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(a[0].shape) or attention(*a, **k),
    )
    for lengths, shapes in (((64, 64), [(2, 5, 1, 512)]), ((64, 32), [(1, 5, 1, 512)] * 2)):
        for layout in ("paged", "dense"):
            calls.clear()
            case = make_case(Shape(64, 2, 5, layout=layout, lengths=lengths))
            mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=MLX)
            assert calls == shapes


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("plan", [MLX, Plan("mlx_rows"), Plan("split", 2)], ids=str)
def test_nothing_is_evaluated_while_building(plan: Plan) -> None:
    case = make_case(Shape(100, 2, 5, lengths=(100, 40)))
    before = mx.get_active_memory()
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
    )
    assert mx.get_active_memory() - before < 256  # constants
    mx.eval(out, lse)
    assert mx.get_active_memory() - before >= out.nbytes + lse.nbytes


def test_a_back_end_runs_what_it_does_not_refuse() -> None:
    case = make_case(Shape(100, 2, 5, "float32"))
    lengths, starts = case.shape.all_lengths, (0, 0)
    call = backends.Call(
        *(case.q_nope, case.q_pe, case.cache, case.scale, case.shape, lengths, starts), 1, True
    )
    for plan in (MLX, Plan("mlx_rows")):
        out, lse = MlxBackend("metal").run(plan, call)
        assert check(case, out, lse, plan).ok
