"""The Metal kernels, run by the emulator through the product's front door, against float64.

Every unused slot of a cache is NaN, every unused entry of a block table wild. In the checked mode a
race, an access out of bounds or a divergence raises. No Apple GPU is involved.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner.backends.metal_tiles import TILES
from mla_tuner.backends.shaders import text
from mla_tuner.caches import PagedCache
from mla_tuner.cases import Case, check, make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import Geometry, Shape
from tools import msl
from tools.msl import decode as front_door
from tools.msl.decode import Decoded

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

HALF, BFLOAT, FLOAT = "float16", "bfloat16", "float32"
G512, G512_0, G256, G256_32 = (Geometry(*g) for g in ((512, 64), (512, 0), (256, 64), (256, 32)))


def single(tile: str) -> Plan:
    return Plan("single", 1, tile)


def split(tile: str, partitions: int = 3) -> Plan:
    return Plan("split", partitions, tile)


def ragged(
    lengths: tuple[int, ...],
    heads: int,
    dtype: str = HALF,
    geometry: Geometry = G512,
    q_len: int = 1,
    layout: str = "paged",
) -> Shape:
    return Shape(max(lengths), len(lengths), heads, dtype, geometry, q_len, layout, lengths)


@cache
def type_errors(text: str) -> str:
    """Of a text that a test runs; "" where the check is missing (test_types is skipped there)."""
    return msl.type_check(text) if find_spec("ziglang") else ""


def decode(case: Case, plan: Plan, mode: str = "fast", **options: Any) -> Decoded:
    """The decode, and its texts pass the type check."""
    done = front_door.decode(case, plan, mode, **options)
    for launch in done.launches:
        assert not type_errors(launch.text)
    return done


# Between them: every tile, dtype, geometry and layout; empty, one-token and one-piece sequences;
# heads that leave a tile half full; queries that see no token; small inputs in constant memory.
CASES: dict[str, tuple[Shape, Plan, dict[str, Any]]] = {
    "v1t8": (ragged((150, 20), 1, BFLOAT), split("v1t8"), {"block_size": 8}),
    "v2t8": (
        ragged((75, 2, 1), 5, geometry=G256_32, layout="dense"),
        single("v2t8"),
        {"starts": (3, 0, 7)},
    ),
    "v4t8": (ragged((150, 20), 3, FLOAT, G512_0), split("v4t8"), {"block_size": 24}),
    "v4t8-queries": (
        ragged((70, 3), 2, q_len=4, layout="dense"),
        split("v4t8"),
        {"starts": (2, 9), "strided": True},
    ),
    "r8t32": (
        ragged((150, 5, 0), 1, q_len=8, layout="dense"),
        split("r8t32"),
        {"starts": (1, 0, 8), "strided": True},
    ),
    "r8t16": (ragged((75, 20), 7, FLOAT, G256), single("r8t16"), {"block_size": 24}),
    "r8t16f": (ragged((90, 0, 33), 5, BFLOAT), split("r8t16f"), {"block_size": 16}),
    "r16t16": (ragged((150, 0, 1, 64), 20), split("r16t16"), {"block_size": 16}),
    "r16t16-dense": (
        ragged((75, 2, 1), 7, BFLOAT, q_len=3, layout="dense"),
        single("r16t16"),
        {"starts": (3, 0, 7)},
    ),
    "r16t16a": (ragged((150, 17), 16, BFLOAT), split("r16t16a"), {"block_size": 8}),
    "r16t16a-256": (ragged((40, 8), 12, HALF, G256), single("r16t16a"), {"block_size": 64}),
    "r16t8": (ragged((75, 20), 9, HALF, G512_0), split("r16t8"), {"block_size": 40}),
    "r16t32": (ragged((150, 20), 16), split("r16t32"), {"block_size": 64}),
    "r16t8f": (ragged((75, 20), 9, BFLOAT, G256_32), split("r16t8f"), {}),
    "r16t8f-512": (ragged((75, 20), 9, BFLOAT), split("r16t8f"), {"block_size": 8}),
    "r16t8-float32": (ragged((75, 20), 5, FLOAT, q_len=3), split("r16t8"), {"block_size": 8}),
    "r24t8": (ragged((75, 20, 2), 3, q_len=8), single("r24t8"), {}),
    "r24t8-bfloat16": (ragged((75, 20, 2), 7, BFLOAT, q_len=4), split("r24t8"), {}),
    "eight sequences": (ragged((20, 9, 8, 7, 0, 1, 30, 16), 10), single("r16t16"), {}),
}


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """Compiles what many tests use on all cores."""
    launches = []
    for shape, plan, options in CASES.values():
        launches += decode(make_case(shape, **options), plan, "dry").launches
    msl.prepare({launch.text for launch in launches}, "check")
    launches = [launch for tile in SWEPT for launch in swept(tile, 1, 1, "dry")[1].launches]
    msl.prepare({launch.text for launch in launches}, "fast")


def right(case: Case, plan: Plan, mode: str = "fast", **options: Any) -> Decoded:
    """The decode, after its answer was found right."""
    done = decode(case, plan, mode, **options)
    result = check(case, done.out, done.lse, plan)
    assert result.ok, f"{case.shape}, {plan}: {result.reason}"
    return done


def test_every_tile_is_checked() -> None:
    assert {plan.tile for _, plan, _ in CASES.values()} == set(TILES)


@pytest.mark.parametrize("name", CASES)
def test_checked(name: str) -> None:
    shape, plan, options = CASES[name]
    case = make_case(shape, **options)
    launches = right(case, plan, "check").launches
    counts = launches[0].counts
    assert counts is not None
    planned = TILES[plan.tile].threadgroup_bytes(shape.geometry, shape.dtype)
    assert counts.threadgroup_bytes == planned
    kernels = [f"mla_{TILES[plan.tile].kernel}"] + ["mla_reduce"] * (plan.path == "split")
    assert [launch.name for launch in launches] == kernels
    right(case, plan, "check", shuffle=7)  # another legal order of the threads


@pytest.mark.parametrize("name", CASES)
def test_types(name: str) -> None:
    pytest.importorskip("ziglang", reason="the type check needs zig's clang: pip install ziglang")
    shape, plan, options = CASES[name]
    decode(make_case(shape, **options), plan, "dry")


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_types_of_short_and_long_inputs(tile: str, layout: str) -> None:
    """Inputs of fewer than 8 numbers arrive in constant memory."""
    pytest.importorskip("ziglang", reason="the type check needs zig's clang: pip install ziglang")
    for batch, context in ((1, 70), (1, 600), (8, 70)):
        case = make_case(Shape(context, batch, 4, HALF, layout=layout))
        if isinstance(case.cache, PagedCache):
            table = case.cache.block_tables[:, : context // 32 + 1]
            case = replace(case, cache=replace(case.cache, block_tables=table))
        decode(case, split(tile), "dry")


# --- many shapes, one text a tile -----------------------------------------------------------------

SWEPT = ("v2t8", "v4t8", "r8t32", "r16t16", "r16t16a", "r24t8")


def swept(tile: str, heads: int, q_len: int, mode: str) -> tuple[Case, Decoded]:
    shape = ragged((100, 0, 1, 16, 17, 7, 64), heads, q_len=q_len)
    case = make_case(shape, seed=heads + q_len, block_size=16)
    return case, decode(case, split(tile, 2), mode)


@pytest.mark.parametrize("tile", SWEPT)
def test_heads_and_query_tokens(tile: str) -> None:
    for heads, q_len in (
        (1, 1),
        (1, 2),
        (3, 3),
        (5, 4),
        (8, 5),
        (12, 6),
        (11, 7),
        (16, 8),
        (20, 1),
    ):
        case, done = swept(tile, heads, q_len, "fast")
        result = check(case, done.out, done.lse, split(tile, 2))
        assert result.ok, f"{case.shape}: {result.reason}"


@pytest.mark.parametrize("tile", ["r16t16", "r24t8"])
@pytest.mark.parametrize(("heads", "q_len"), [(40, 1), (128, 1), (128, 8)])
def test_many_rows(tile: str, heads: int, q_len: int) -> None:
    lengths = (130, 65) if q_len == 1 else (70, 5)
    right(make_case(ragged(lengths, heads, q_len=q_len), block_size=8), split(tile))


@pytest.mark.parametrize("tile", ["r16t16", "r16t16a", "r8t32", "v2t8"])
def test_long(tile: str) -> None:
    heads = TILES[tile].rows
    right(make_case(ragged((4096, 1000), heads), block_size=64), split(tile, 8))


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
def test_large_logits(tile: str) -> None:
    right(make_case(ragged((200, 90), 4), logit_scale=30.0), split(tile))


@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
def test_a_sequence_may_be_shorter_than_its_queries(tile: str) -> None:
    done = right(make_case(ragged((70, 1, 3, 0), 2, q_len=4)), split(tile))
    assert np.isneginf(np.asarray(done.lse)[1, :, :3]).all()


# --- softmax weights ------------------------------------------------------------------------------


def one_large_weight(dtype: str, weight: float, value: float) -> Case:
    """A token of weight 1 that points to `value`, and 1023 of `weight` that point to 1."""
    tokens = np.zeros((32, 32, 576), np.float32)
    tokens[..., :512] = 1.0
    tokens[0, 0, :512] = value
    tokens[0, 0, 512] = 1.0  # the only score
    q_pe = np.zeros((1, 8, 1, 64), np.float32)
    q_pe[..., 0] = 1.0
    latent, q_pe, q_nope = (
        mx.array(x).astype(getattr(mx, dtype)) for x in (tokens, q_pe, np.zeros((1, 8, 1, 512)))
    )
    cache = PagedCache(latent, mx.arange(32, dtype=mx.int32)[None], (1024,))
    return Case(Shape(1024, 1, 8, dtype), q_nope, q_pe, cache, -float(np.log(weight)))


SMALL = 1.5 * 2.0**-24  # 1.5 units of the smallest half, which would round to 2
UNEVEN = 0.5 + 0.95 * 2.0**-9  # bfloat16 would take it for 0.5


def test_small_weights_of_many_tokens_count() -> None:
    done = right(one_large_weight(HALF, SMALL, 2.0**-6), single("r8t32"))
    assert 1.005 < float(done.out[0, 0, 0, 0]) * 2**6 < 1.007
    right(one_large_weight(BFLOAT, SMALL, 2.0**-8), single("r8t16f"))


def test_weights_are_not_rounded_to_bfloat16() -> None:
    done = right(one_large_weight(BFLOAT, UNEVEN, 1.0), single("r16t16"))
    assert float(done.out[0, 0, 0, 0]) == 1.0


# --- 64-bit offsets -------------------------------------------------------------------------------


def test_offsets_beyond_32_bits() -> None:
    """The kernels' own functions, on strides that no test could allocate."""
    header = text(("metal/common.metal",), "metal/lanes.body.metal").header
    body = """
      Cache<half> cache = cache_of<false>(id[0], 512, base, shape, strides, base, strides);
      found[0] = cache.latent - base;
      found[1] = cache.pe - base;
      cache = cache_of<true>(0, 512, base, shape, strides, base, strides);
      found[2] = latent_offset(cache, id[0], id[1]);
      found[3] = pe_offset(cache, id[1], id[0]);
      Span span;
      span.q_len = 8;
      found[4] = query_offset(span, id[0], strides);
      found[5] = own_rows(base, uint3(0, id[0], 63), 64, 1024, 512) - base;
      found[6] = thread_position_in_grid.x;
    """
    strides = [2**33, 2**31 + 8, 2**30, 1]
    with msl.emulated("fast"):
        kernel = mx.fast.metal_kernel(
            name="offsets",
            input_names=["id", "base", "shape", "strides"],
            output_names=["found"],
            header=header,
            source=body,
        )
        (found,) = kernel(
            inputs=[
                mx.array([1000, 70], mx.int32),
                mx.zeros(8, mx.float16),
                mx.array([2000, 16, 2, 512], mx.int32),
                mx.array(strides, mx.int64),
            ],
            output_shapes=[(7,)],
            output_dtypes=[mx.int64],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
    outer, middle = strides[:2]
    paged = [1000 * outer + 70 * middle, 70 * outer + 1000 * middle]
    rows = (1000 * 64 + 63) * 1024 * 512
    assert found.tolist() == [1000 * outer, 1000 * outer, *paged, 125 * middle, rows, 0]


def test_offsets_of_the_merge_beyond_32_bits() -> None:
    """Its own statement, in a launch that is too large for a test."""
    body = text((), "metal/reduce.body.metal").body
    (statement,) = re.findall(r"const long row=[^;]*first=[^;]*;", body)
    with msl.emulated("fast"):
        kernel = mx.fast.metal_kernel(
            name="offsets",
            input_names=["y"],
            output_names=["found"],
            source=f"""
              const uint3 group = uint3(5, y, 0);
              const int rows = 1024, pieces = 64;
              {statement}
              found[0] = row;
              found[1] = first;
            """,
        )
        (found,) = kernel(
            inputs=[mx.array(2**22, mx.int32)],
            output_shapes=[(2,)],
            output_dtypes=[mx.int64],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
    assert found.tolist() == [2**32 + 5, 2**38 + 5]


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["r16t16", "v4t8"])
def test_a_cache_of_more_than_2_to_the_31_elements(tile: str) -> None:
    """8.7 GB at the peak, for two copies of the cache."""
    case = make_case(ragged((150, 20), 4), block_size=64)
    assert isinstance(case.cache, PagedCache)
    small, far = case.cache.latent, 2**31 // (64 * 576) + 1
    latent = mx.concatenate([mx.zeros((far, 64, 576), mx.float16), small])
    assert latent.size > 2**31
    known = case.cache.block_tables < small.shape[0]
    table = mx.where(known, case.cache.block_tables + far, case.cache.block_tables)
    right(replace(case, cache=replace(case.cache, latent=latent, block_tables=table)), split(tile))


# --- the small kernels ----------------------------------------------------------------------------


def test_merging_goes_by_weight() -> None:
    rng = np.random.default_rng(0)
    part = rng.standard_normal((2, 70, 3, 256)).astype(np.float32)
    lse = (rng.standard_normal((2, 70, 3)) * 3).astype(np.float32)
    lse[0, 5], part[0, 5] = -np.inf, np.nan  # a piece without tokens writes no output
    lse[1, :, 2], part[1, :, 2] = -np.inf, np.nan
    with msl.emulated("check"):
        body = text((), "metal/reduce.body.metal").body
        merge = mx.fast.metal_kernel(
            name="mla_reduce",
            input_names=["part", "part_lse"],
            output_names=["out", "lse"],
            source=body,
        )
        out, total = merge(
            inputs=[mx.array(part), mx.array(lse)],
            template=[("T", mx.float32), ("RANK", 256)],
            output_shapes=[(2, 3, 256), (2, 3)],
            output_dtypes=[mx.float32, mx.float32],
            grid=(3 * 64, 2, 1),
            threadgroup=(64, 1, 1),
        )
    with np.errstate(all="ignore"):
        weights = np.exp(lse.astype(np.float64))
        want = np.nansum(part * weights[..., None], 1) / weights.sum(1)[..., None]
        want_total = np.log(weights.sum(1))
    want[1, 2] = 0
    assert np.abs(np.asarray(out) - want).max() < 1e-6
    assert np.allclose(np.asarray(total), want_total, rtol=0, atol=2e-6)


def test_lanes_hold_what_the_matrix_kernel_expects() -> None:
    with msl.emulated("check") as launches:
        show = mx.fast.metal_kernel(
            name="mla_lanes",
            input_names=["zero"],
            output_names=["seen"],
            source=text((), "metal/lanes.body.metal").body,
        )
        (seen,) = show(
            inputs=[mx.zeros(8)],
            output_shapes=[(32, 2)],
            output_dtypes=[mx.float32],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )
    lane = np.arange(32)
    row, pair = (lane >> 2 & 4) | (lane >> 1 & 3), (lane >> 2 & 2) | (lane & 1)
    assert (np.asarray(seen) == (row * 8 + 2 * pair)[:, None] + [0, 1]).all()
    pytest.importorskip("ziglang", reason="the type check needs zig's clang: pip install ziglang")
    assert msl.type_check(launches[0].text) == ""
