"""The Metal kernels, broken in one place at a time: the emulator or the numbers show each break.

The places are written as in shaders/metal and looked for in the shortened text that MLX compiles.
One that is not there exactly once any more is an error here: the mutant must follow the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from test_metal_kernels import ragged, small_weights

from mla_tuner.backends.shaders import minified
from mla_tuner.caches import PagedCache
from mla_tuner.cases import Case, check, make_case
from mla_tuner.plan import Plan
from tools import msl
from tools.msl.decode import Decoded, decode

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
UNORDERED = "race|uninitialised"  # what the checked mode says of memory that no barrier orders
OUTSIDE = "out of bounds|race"  # or it meets what another threadgroup wrote
WRONG = ""  # nothing is reported, but the numbers are wrong


class Mutant(NamedTuple):
    name: str
    old: str
    new: str
    seen: str = WRONG
    case: str = "paged"


MATRIX = [
    Mutant("barrier A", f"{BARRIER} softmax(shared", "softmax(shared", UNORDERED),
    Mutant("barrier B", f"{BARRIER} add_values(o, k", "add_values(o, k", UNORDERED),
    Mutant("barrier C", f"{BARRIER} store<Tile>(", "store<Tile>(", UNORDERED),
    Mutant("tail is read", "there = known && w.token + row < end", "there = known"),
    Mutant("tail is not zero", "known ? 0u : ~0u", "~0u"),
    Mutant("table is read past its end", "if (w.token < end) {", "if (true) {", OUTSIDE, "full"),
    Mutant(
        "any id is followed",
        "known = uint(id) < uint(cache.blocks)",
        "known = true",
        "out of bounds",
        "wild",
    ),
    Mutant("an unknown block is zeros", "known ? 0u : ~0u", "0u", WRONG, "wild"),
    Mutant("scale of scores", "? s * scale : -INFINITY", "? s : -INFINITY"),
    Mutant("no mask", "token + column < running.limit[pass] ?", "true ?"),
    Mutant(
        "rope part of scores",
        "i < Tile::TILES; i++) { UNROLL for (int b",
        "i < Tile::RANK_TILES; i++) { UNROLL for (int b",
    ),
    Mutant("rope order of queries", "+ 2 * i + row % 2", "+ 2 * i + 1 - row % 2"),
    Mutant("latent order of queries", "i % (V / 2) * 2 + row % 2", "i % (V / 2) * 2 + 1 - row % 2"),
    Mutant("order of outputs", "(to + i / (V / 2) * 4 * V + i % (V / 2) * 2)", "(to + i * 2)"),
    Mutant(
        "queries past the last row",
        "const bool there = mine < span.rows",
        "const bool there = true",
        OUTSIDE,
        "dense",
    ),
    Mutant("outputs past the last row", "if (mine < span.rows) {", "if (true) {", OUTSIDE),
    Mutant(
        "LSE past the last row", "if (span.first_row + row < span.rows) {", "if (true) {", OUTSIDE
    ),
    Mutant("shares of scores", "g < Tile::SIMDS; g++", "g < Tile::SIMDS - 1; g++"),
    Mutant("running maximum", "top = max(top, running.largest[pass]);", ""),
    Mutant(
        "rows without tokens",
        "const float base = top > -INFINITY ? top : 0.0f",
        "const float base = top",
    ),
    Mutant("rescale of the sum", "running.weight[pass] * factor + e", "running.weight[pass] + e"),
    Mutant("rescale is asked for", "if (simd_any(moved)) {", "if (false) {"),
    Mutant("rescale of a column", "o[b][i].thread_elements()[1] *= factor[b];", ""),
    Mutant("weights of the other column", "Used(from[1])", "Used(from[0])"),
    Mutant("sum of a row", "sum += simd_shuffle_xor(sum, step);", ""),
    Mutant("division", "thread_elements()[e % 2] * by)", "thread_elements()[e % 2])"),
    Mutant("division by nothing", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum", WRONG, "single"),
    Mutant(
        "exponent in the LSE",
        "running.largest[pass] - Weight<typename Tile::M>::EXPONENT",
        "running.largest[pass]",
    ),
    Mutant(
        "small weights",
        "typedef half Used; enum : int { EXPONENT = 15 };",
        "typedef half Used; enum : int { EXPONENT = 0 };",
        WRONG,
        "small",
    ),
    Mutant("half a tile", "span.rows - span.first_row <= Short::ROWS", "true"),
    Mutant(
        "place of a piece",
        "(long(group.y) * pieces + group.z) * span.rows",
        "(long(group.z) * pieces + group.y) * span.rows",
        OUTSIDE,
    ),
    # In common.metal.
    Mutant("end of a piece", "min(span.begin + piece, span.length)", "span.length"),
    Mutant("length of another sequence", "lengths[group.y]", "lengths[0]"),
    Mutant(
        "left padding",
        "starts[group.y] + int(group.z) * piece",
        "int(group.z) * piece",
        WRONG,
        "dense",
    ),
    Mutant(
        "causal limit", "min(span.end, span.length - span.q_len + 1 + row % span.q_len)", "span.end"
    ),
    Mutant("causal limit off by one", "span.q_len + 1 + row", "span.q_len + 2 + row"),
    Mutant("scale of the call", "span.scale = scale * M_LOG2E_F", "span.scale = M_LOG2E_F"),
    Mutant("base of the exponential", "span.scale = scale * M_LOG2E_F", "span.scale = scale"),
    Mutant(
        "query of a head",
        "head * strides[1] + query * strides[2]",
        "query * strides[1] + head * strides[2]",
    ),
    Mutant("place of rope numbers", "(PAGED ? rank : sequence", "(PAGED ? 0 : sequence"),
    Mutant("sequence of a dense cache", "(PAGED ? 0 : sequence * strides[0])", "0", WRONG, "dense"),
    Mutant(
        "rope sequence of a dense cache",
        "(PAGED ? rank : sequence * pe_strides[0])",
        "0",
        WRONG,
        "dense",
    ),
    Mutant("block of a token", "block * cache.latent_block + token", "token"),
    Mutant("token of a block", "+ token * cache.latent_token", ""),
    Mutant("rope block of a token", "block * cache.pe_block + token", "token"),
    Mutant("next block", "w.block++;", ""),
    Mutant("order of memory", "latent_fits && pe_fits ? (", "true ? (", WRONG, "transposed"),
    Mutant("LSE of a piece without tokens", "lse[row] = -INFINITY;", ""),
    Mutant("output without tokens", "out[i] = Out(0.0f);", "", WRONG, "single"),
    Mutant("LSE in log2", "(largest + log2(sum)) * M_LN2_F", "(largest + log2(sum))"),
]

VECTOR = [
    Mutant("barrier D", f"{BARRIER} const int group", "const int group", UNORDERED),
    Mutant(
        "barrier E",
        f"{BARRIER} UNROLL for (int r = 0; r < ROWS; r++) {{ if",
        "UNROLL for (int r = 0; r < ROWS; r++) { if",
        UNORDERED,
    ),
    Mutant("barrier F", f"{BARRIER} if (row < span.rows)", "if (row < span.rows)", UNORDERED),
    Mutant("barrier G", f"if (r > 0) {{ {BARRIER} }}", "", UNORDERED),
    Mutant(
        "tail is read",
        "token = tokens.latent + min(j, tokens.last) *",
        "token = tokens.latent + j *",
    ),
    Mutant(
        "rope tail is read", "tokens.pe[min(j, tokens.last) *", "tokens.pe[j *", OUTSIDE, "dense"
    ),
    Mutant(
        "any id is followed", "uint(id) >= uint(cache.blocks)", "false", "out of bounds", "wild"
    ),
    Mutant("an unknown block is left out", "weight = NAN;", "", WRONG, "wild"),
    Mutant("no mask", "w.token + pair % STEP < limit ? score : -INFINITY", "score"),
    Mutant("scale of queries", "queries[i] = value * span.scale", "queries[i] = value"),
    Mutant(
        "queries past the last row",
        "if (row < span.rows) { value",
        "if (true) { value",
        OUTSIDE,
        "dense",
    ),
    Mutant(
        "outputs past the last row",
        "if (row < span.rows) { for",
        "if (true) { for",
        OUTSIDE,
        "dense",
    ),
    Mutant("rope part of scores", "e < ROPE / 32; e++", "e < 0; e++"),
    Mutant("sums over half the lanes", "fold<16>(s);", ""),
    Mutant("halves exchanged", "(upper ? high : low) + ", "(upper ? low : high) + "),
    Mutant("lane of a token", "simd_shuffle(weight, r * STEP + j)", "simd_shuffle(weight, j)"),
    Mutant("running maximum", "top = max(top, largest);", ""),
    Mutant(
        "rows without tokens",
        "const float base = top > -INFINITY ? top : 0.0f; const float e",
        "const float base = top; const float e",
    ),
    Mutant("rescale of the sum", "weight = fma(weight, factor, e)", "weight = weight + e"),
    Mutant("rescale is asked for", "if (simd_any(factor != 1.0f)) {", "if (false) {"),
    Mutant("rescale of another row", "simd_shuffle(factor, r * STEP)", "simd_shuffle(factor, 0)"),
    Mutant("streams", "span.begin + stream * STEP", "span.begin"),
    Mutant("sum of a row", "weight += simd_shuffle_xor(weight, step);", ""),
    Mutant(
        "total of the streams",
        "weights[i * ROWS + r] * exp2(tops[i * ROWS + r] - base)",
        "weights[i * ROWS + r]",
    ),
    Mutant("weight of a stream", "exp2(tops[simd * ROWS + r] - base) / total", "1.0f / total"),
    Mutant("division by nothing", "total == 0.0f ? 0.0f : exp2(", "exp2(", WRONG, "single"),
    Mutant("a stream left out", "i < STREAMS; i++) { sum +=", "i < STREAMS - 1; i++) { sum +="),
    Mutant("output without tokens", "out[i] = Out(0.0f);", "", WRONG, "single"),
]

REDUCE = [
    Mutant("largest LSE", "top = simd_max(top);", ""),
    Mutant("total", "total = simd_sum(total);", ""),
    Mutant("weight of a piece", "fma(weight, from[e], sum[e])", "from[e] + sum[e]"),
    Mutant("pieces without tokens", "if (weight > 0.0f) {", "if (true) {"),
    Mutant("division", "sum[e] / total", "sum[e]"),
    Mutant("division by nothing", "total == 0.0f ? 0.0f : sum[e] / total", "sum[e] / total"),
    Mutant("base of the LSE", "base + log(total)", "log(total)"),
    Mutant("row of a piece", "(first + (i + j) * rows) * RANK", "(first + (i + j)) * RANK"),
]

TILE = {"matrix": "r16t16", "vector": "v4t8", "reduce": "v4t8"}
ALL = [
    pytest.param(kernel, mutant, id=f"{kernel}: {mutant.name}")
    for kernel, mutants in (("matrix", MATRIX), ("vector", VECTOR), ("reduce", REDUCE))
    for mutant in mutants
]


@cache
def case_of(name: str) -> Case:
    """Small, and between them with all that a mutant may be careless about."""
    lengths = (162, 20, 3, 0)  # the last tokens are masked for some queries
    if name == "small":
        return small_weights()
    if name in ("paged", "single"):
        return make_case(ragged(lengths, 5, q_len=4), block_size=16, logit_scale=2.0)
    if name == "full":  # the last sequence fills the table, and the table its memory
        case = make_case(ragged((24, 136), 16), block_size=8)
        table = mx.contiguous(_paged(case).block_tables[:, :17])
        return replace(case, cache=replace(_paged(case), block_tables=table))
    if name == "wild":
        case = make_case(ragged((150, 20), 4), block_size=16)
        table = np.array(_paged(case).block_tables)
        table[1, 1] = len(table[0]) + 1000
        return replace(case, cache=replace(_paged(case), block_tables=mx.array(table)))
    shape = ragged((20, 149), 5, layout="dense")
    case = make_case(shape, starts=(5, 2), poison=name == "dense")
    if name == "transposed":
        latent = mx.contiguous(case.cache.latent.swapaxes(2, 3)).swapaxes(2, 3)
        return replace(case, cache=replace(case.cache, latent=latent))
    return case


def _paged(case: Case) -> PagedCache:
    assert isinstance(case.cache, PagedCache)
    return case.cache


def plan_of(kernel: str, name: str) -> Plan:
    tile = "r8t32" if name == "small" else TILE[kernel]
    return Plan("single", 1, tile) if name in ("single", "small") else Plan("split", 3, tile)


def breaking(kernel: str, mutant: Mutant) -> Callable[[str], str]:
    old, new = minified(mutant.old), minified(mutant.new)

    def edit(text: str) -> str:
        if f"custom_kernel_mla_{kernel}_" not in text:
            return text
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        return text.replace(old, new)

    return edit


def run(kernel: str, mutant: Mutant, mode: str = "") -> Decoded:
    """In the mode that the mutant should be seen in, or in another."""
    plan = plan_of(kernel, mutant.case)
    mode = mode or ("check" if mutant.seen else "fast")
    return decode(case_of(mutant.case), plan, mode, edit=breaking(kernel, mutant))


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """Compiles all mutants on all cores."""
    wanted: dict[str, set[str]] = {"check": set(), "fast": set()}
    for kernel, mutant, *_ in (parameters.values for parameters in ALL):
        with suppress(AssertionError):  # of a mutant that lost its place: its own test will say so
            launches = run(kernel, mutant, "dry").launches
            wanted["check" if mutant.seen else "fast"] |= {launch.text for launch in launches}
    for mode, found in wanted.items():
        msl.prepare(found, mode)


def verdict(name: str, done: Decoded, plan: Plan) -> str:
    """What is wrong with the answer; "" if nothing is."""
    case = case_of(name)
    if name == "transposed":
        return "" if np.isnan(np.asarray(done.out)).all() else "a transposed cache was read"
    if name == "wild":
        out, lse = np.asarray(done.out), np.asarray(done.lse)
        nan = np.isnan(out[1]).all() and np.isnan(lse[1]).all() and np.isfinite(out[0]).all()
        return "" if nan else "an unknown block did not give NaN"
    return check(case, done.out, done.lse, plan).reason


@pytest.mark.parametrize(("kernel", "mutant"), ALL)
def test_a_break_is_seen(kernel: str, mutant: Mutant) -> None:
    if mutant.seen:
        with pytest.raises(msl.EmulationError, match=mutant.seen):
            run(kernel, mutant)
        return
    try:
        done = run(kernel, mutant)
    except msl.EmulationError:
        return  # a guard page
    assert verdict(mutant.case, done, plan_of(kernel, mutant.case))


@pytest.mark.parametrize("kernel", ["matrix", "vector"])
@pytest.mark.parametrize(
    "name", ["paged", "single", "full", "wild", "dense", "transposed", "small"]
)
def test_whole_kernels_are_right(kernel: str, name: str) -> None:
    """Else the verdicts above would mean nothing."""
    plan = plan_of(kernel, name)
    assert not verdict(name, decode(case_of(name), plan, "fast"), plan)


@pytest.mark.parametrize(("kernel", "mutants"), [("matrix", MATRIX), ("vector", VECTOR)])
def test_every_barrier_has_its_mutant(kernel: str, mutants: list[Mutant]) -> None:
    text = decode(case_of("paged"), plan_of(kernel, "paged"), "dry").launches[0].text
    barriers = len(re.findall(r"threadgroup_barrier\(", text))
    assert barriers == sum(mutant.seen == UNORDERED for mutant in mutants)
