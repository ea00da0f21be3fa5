"""What the Metal kernels make of memory: blocks that are not there, strides, starts of slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from test_metal_kernels import HALF, decode, ragged, right, single, split

from mla_tuner.caches import DenseCache, PagedCache
from mla_tuner.cases import Case, make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools import msl

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_block_that_does_not_exist_gives_nan(tile: str, partitions: int) -> None:
    """On a GPU no one can raise, and following the id would read any memory."""
    case = make_case(ragged((100, 60, 75), 4), block_size=16)
    assert isinstance(case.cache, PagedCache)
    blocks = case.cache.latent.shape[0]
    plan = split(tile, 2) if partitions == 2 else single(tile)
    for wild in (blocks, -1, 2147480000):
        table = np.array(case.cache.block_tables)
        table[1, 2] = wild
        broken = replace(case, cache=replace(case.cache, block_tables=mx.array(table)))
        done = decode(broken, plan, "check")
        out, lse = np.asarray(done.out), np.asarray(done.lse)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        assert np.isfinite(out[[0, 2]]).all()
        assert np.isfinite(lse[[0, 2]]).all()


def transposed(x: mx.array) -> mx.array:
    return mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3)


def slice_of(width: int, start: int, x: mx.array) -> mx.array:
    """`x` as numbers `start` and the next of rows of `width`."""
    wide = mx.zeros((*x.shape[:-1], width), x.dtype)
    part = slice(start, start + x.shape[-1])
    wide[..., part] = x
    mx.eval(wide)
    return wide[..., part]


def every_other(x: mx.array) -> mx.array:
    return mx.repeat(x, 2, axis=-1)[..., ::2]


def apart(gap: int, x: mx.array) -> mx.array:
    """`x` with `gap` more numbers between the sequences."""
    wide = mx.pad(x.reshape(x.shape[0], -1), ((0, 0), (0, gap)))
    _, _, tokens, width = x.shape
    return mx.as_strided(wide, x.shape, (wide.shape[1], tokens * width, width, 1))


# Dense caches in float16 that no lane could read in steps: which array, and what becomes of it.
UNREADABLE: dict[str, tuple[str, Callable[[mx.array], mx.array]]] = {
    "latent transposed": ("latent", transposed),
    "every other number, latent": ("latent", every_other),
    "latent in rows of 516": ("latent", partial(slice_of, 516, 0)),
    "latent from number 1": ("latent", partial(slice_of, 520, 1)),
    "latent from number 4": ("latent", partial(slice_of, 520, 4)),
    "latents 4 numbers apart": ("latent", partial(apart, 4)),
    "k_pe transposed": ("k_pe", transposed),
    "every other number, k_pe": ("k_pe", every_other),
    "k_pe in rows of 65": ("k_pe", partial(slice_of, 65, 0)),
    "k_pe from number 1": ("k_pe", partial(slice_of, 66, 1)),
    "k_pe a number apart": ("k_pe", partial(apart, 1)),
}


def unreadable(case: Case, name: str) -> Case:
    array, change = UNREADABLE[name]
    return replace(case, cache=replace(case.cache, **{array: change(getattr(case.cache, array))}))


def assert_not_read(case: Case, plan: Plan) -> None:
    done = decode(case, plan, "check")
    assert np.isnan(np.asarray(done.out)).all()
    assert np.isnan(np.asarray(done.lse)).all()


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_memory_that_is_not_in_steps_is_not_read(tile: str, name: str) -> None:
    """Lanes load 16 bytes of a token at once: such a cache answers NaN, never nonsense."""
    case = make_case(ragged((70, 64), 4, layout="dense"), poison=False)
    assert_not_read(unreadable(case, name), single(tile))


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
@pytest.mark.parametrize(("width", "start"), [(580, 0), (584, 4)])
def test_blocks_that_are_not_in_steps_are_not_read(tile: str, width: int, start: int) -> None:
    case = make_case(ragged((70, 64), 4), poison=False)
    assert isinstance(case.cache, PagedCache)
    blocks = slice_of(width, start, case.cache.latent)
    assert_not_read(replace(case, cache=replace(case.cache, latent=blocks)), single(tile))


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
def test_slices_in_steps_are_read(tile: str) -> None:
    case = make_case(ragged((70, 64), 4, layout="dense"))
    assert isinstance(case.cache, DenseCache)
    assert case.cache.k_pe is not None
    latent, k_pe = apart(8, case.cache.latent), slice_of(68, 2, case.cache.k_pe)
    right(replace(case, cache=replace(case.cache, latent=latent, k_pe=k_pe)), split(tile), "check")
    latent, k_pe = slice_of(528, 8, case.cache.latent), apart(2, case.cache.k_pe)
    right(replace(case, cache=replace(case.cache, latent=latent, k_pe=k_pe)), split(tile), "check")


def queries_last(case: Case) -> Case:
    """The same queries, in memory [batch, q_len, width, heads]: no stride is 1 but the heads'."""

    def other(x: mx.array) -> mx.array:
        return mx.contiguous(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)

    assert case.q_pe is not None
    return replace(case, q_nope=other(case.q_nope), q_pe=other(case.q_pe))


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
def test_strides_are_followed(tile: str) -> None:
    """Queries of any order, a slice of a wider table, rope numbers behind the latent ones."""
    case = make_case(ragged((70, 64), 4, q_len=2))
    assert isinstance(case.cache, PagedCache)
    table = case.cache.block_tables
    wide = mx.full((2, 2 * table.shape[1] + 1), 7, mx.int32)
    wide[:, 1::2] = table
    right(
        replace(queries_last(case), cache=replace(case.cache, block_tables=wide[:, 1::2])),
        split(tile),
        "check",
    )
    case = make_case(ragged((70, 64), 4, layout="dense"))
    assert isinstance(case.cache, DenseCache)
    assert case.cache.k_pe is not None
    both = mx.concatenate([case.cache.latent, case.cache.k_pe], axis=-1)
    cache = replace(case.cache, latent=both[..., :512], k_pe=both[..., 512:])
    right(replace(case, cache=cache), split(tile), "check")


@pytest.mark.parametrize("tile", ["r8t16", "v1t8"])
def test_a_single_slice_may_have_any_stride(tile: str) -> None:
    case = make_case(Shape(70, 1, 1, HALF, layout="dense"))
    assert isinstance(case.cache, DenseCache)
    assert case.cache.k_pe is not None
    # A new axis has stride 1, which no load of 16 bytes would fit.
    latent, k_pe = (x[0, 0][None, None] for x in (case.cache.latent, case.cache.k_pe))
    right(replace(case, cache=replace(case.cache, latent=latent, k_pe=k_pe)), single(tile))
