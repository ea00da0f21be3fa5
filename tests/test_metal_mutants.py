"""The Metal kernels, broken in one place at a time: the emulator or the numbers show each break.

The places are written as in shaders/metal and looked for in the shortened text that MLX compiles.
One that is not there exactly once any more is an error here: the mutant must follow the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from test_metal_kernels import (
    BFLOAT,
    FLOAT,
    G256,
    G256_32,
    G512,
    HALF,
    SMALL,
    UNEVEN,
    one_large_weight,
    ragged,
)
from test_metal_memory import UNREADABLE, queries_last, unreadable

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
UNALIGNED = "a vector that is not aligned"
WRONG = ""  # nothing is reported, but the numbers are wrong


class Mutant(NamedTuple):
    name: str
    old: str
    new: str
    seen: str = WRONG
    case: str = "paged"


SHORT = "span.rows - span.first_row <= Short::ROWS"  # left out elsewhere: builds take half as long
START = "ulong(memory) % (step * sizeof(T)) == 0 &&"
K_PE_READABLE = "in_steps<TOKEN>(k_pe, shape, pe_strides, 2)"


def barriers_of_the_matrix_kernel(case: str = "paged") -> list[Mutant]:
    return [
        Mutant("barrier A", f"{BARRIER} softmax(shared", "softmax(shared", UNORDERED, case),
        Mutant("barrier B", f"{BARRIER} add_values(o, k", "add_values(o, k", UNORDERED, case),
        Mutant("barrier C", f"{BARRIER} store<Tile>(", "store<Tile>(", UNORDERED, case),
    ]


MATRIX = [
    *barriers_of_the_matrix_kernel(),
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
    Mutant("half a tile", SHORT, "true"),
    Mutant(
        "place of a piece",
        "(long(group.y) * pieces + group.z) * rows",
        "(long(group.z) * pieces + group.y) * rows",
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
    Mutant(
        "order of the latent",
        "strides[TOKEN + 1] == 1",
        "true",
        WRONG,
        "every other number, latent",
    ),
    Mutant("order of rope numbers", f"&& {K_PE_READABLE}", "", WRONG, "k_pe transposed"),
    Mutant("start of the latent", START, "", UNALIGNED, "latent from number 1"),
    Mutant("start of k_pe", START, "", UNALIGNED, "k_pe from number 1"),
    Mutant("step of tokens", "strides[TOKEN] % step == 0", "true", WRONG, "latent in rows of 516"),
    Mutant("step of sequences", "strides[0] % step == 0", "true", WRONG, "latents 4 numbers apart"),
    Mutant("stride of queries", "nope[dim * nope_step]", "nope[dim]", WRONG, "queries"),
    Mutant("stride of rope queries", "rope[dim * pe_step]", "rope[dim]", WRONG, "queries"),
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
    Mutant("stride of queries", "+ dim * nope_strides[3]", "+ dim", WRONG, "queries"),
    Mutant(
        "stride of rope queries", "(dim - RANK) * pe_strides[3]", "(dim - RANK)", WRONG, "queries"
    ),
    Mutant(
        "rope numbers are not looked at", f"&& {K_PE_READABLE}", "", WRONG, "k_pe in rows of 65"
    ),
    Mutant("start of the latent", START, "", UNALIGNED, "latent from number 1"),
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

# Cases for other tiles, dtypes and geometries, and mutants of what is special there.
OTHER_TILES = {
    "ahead": ("r16t16a", HALF, G512),
    "operands in float": ("r8t16f", BFLOAT, G512),
    "float32": ("r16t8", FLOAT, G512),
    "rank 256": ("r16t16", HALF, G256),
    "rank 256, vector": ("v2t8", BFLOAT, G256_32),
}
LARGE_WEIGHTS = {  # tile; arguments of one_large_weight
    "small": ("r8t32", HALF, SMALL, 2.0**-6),
    "small, float": ("r8t16f", BFLOAT, SMALL, 2.0**-8),
    "uneven": ("r16t16", BFLOAT, UNEVEN, 1.0),
}
NEXT = "if (AHEAD) { load_tokens<Tile, PAGED>(next, cache, table, w, span.end, lane); }"
SHARES = Mutant("shares of scores", "g < Tile::SIMDS; g++", "g < Tile::SIMDS - 1; g++")
MATRIX_ELSEWHERE = [
    *barriers_of_the_matrix_kernel("ahead")[:2],
    Mutant("first tokens", f"{NEXT} for (int token", "for (int token", WRONG, "ahead"),
    Mutant("next tokens", f"{NEXT} {BARRIER}", BARRIER, WRONG, "ahead"),
    Mutant(
        "rope numbers of the next tokens",
        "i < Tile::TILES; i++) { k[j][i] = next",
        "i < Tile::RANK_TILES; i++) { k[j][i] = next",
        WRONG,
        "ahead",
    ),
    *barriers_of_the_matrix_kernel("operands in float")[1:2],
    Mutant(
        "bfloat16 numbers of a load",
        "as_type<bfloat2>(raw[i])",
        "as_type<bfloat2>(raw[0])",
        WRONG,
        "operands in float",
    ),
    Mutant(
        "weights in half", "typedef float Stored;", "typedef half Stored;", WRONG, "small, float"
    ),
    Mutant(
        "weights in bfloat16",
        "typedef half Stored; typedef float Used;",
        "typedef bfloat Stored; typedef float Used;",
        WRONG,
        "uneven",
    ),
    *barriers_of_the_matrix_kernel("float32")[1:2],
    SHARES._replace(case="float32"),
    Mutant(
        "float32 numbers of a load",
        "as_type<float>(raw[2 * i + 1])",
        "as_type<float>(raw[2 * i])",
        WRONG,
        "float32",
    ),
    *barriers_of_the_matrix_kernel("rank 256")[:1],
    SHARES._replace(case="rank 256"),
]
VECTOR_ELSEWHERE = [
    Mutant(
        "a stream left out",
        "i < STREAMS; i++) { sum +=",
        "i < STREAMS - 1; i++) { sum +=",
        WRONG,
        "rank 256, vector",
    ),
]
ALL = [
    pytest.param(kernel, mutant, id=f"{kernel}, {mutant.case}: {mutant.name}")
    for kernel, mutants in (
        ("matrix", MATRIX + MATRIX_ELSEWHERE),
        ("vector", VECTOR + VECTOR_ELSEWHERE),
        ("reduce", REDUCE),
    )
    for mutant in mutants
]
WHOLE = sorted({(kernel, mutant.case) for kernel, mutant in (p.values for p in ALL)})


@cache
def case_of(name: str) -> Case:
    """Small, and between them with all that a mutant may be careless about."""
    lengths = (162, 20, 3, 0)  # the last tokens are masked for some queries
    if name in LARGE_WEIGHTS:
        return one_large_weight(*LARGE_WEIGHTS[name][1:])
    if name in OTHER_TILES:
        _, dtype, geometry = OTHER_TILES[name]
        return make_case(ragged(lengths, 5, dtype, geometry, 4), block_size=16)
    if name in ("paged", "single", "queries"):
        case = make_case(ragged(lengths, 5, q_len=4), block_size=16, logit_scale=2.0)
        return queries_last(case) if name == "queries" else case
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
    case = make_case(shape, starts=(5, 3), poison=name == "dense")
    return unreadable(case, name) if name in UNREADABLE else case


def _paged(case: Case) -> PagedCache:
    assert isinstance(case.cache, PagedCache)
    return case.cache


def plan_of(kernel: str, name: str) -> Plan:
    tile, *_ = {**LARGE_WEIGHTS, **OTHER_TILES}.get(name, (TILE[kernel],))
    single = name == "single" or name in LARGE_WEIGHTS
    return Plan("single", 1, tile) if single else Plan("split", 3, tile)


def replaced(text: str, old: str, new: str) -> str:
    old, new = minified(old), minified(new)
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def breaking(kernel: str, mutant: Mutant) -> Callable[[str], str]:
    def edit(text: str) -> str:
        if f"custom_kernel_mla_{kernel}_" not in text:
            return text
        text = replaced(text, mutant.old, mutant.new)
        whole = kernel != "matrix" or mutant.old == SHORT
        return text if whole else replaced(text, f"if (ROW_BLOCKS > 1 && {SHORT})", "if (false)")

    return edit


def run(kernel: str, mutant: Mutant, mode: str = "") -> Decoded:
    """In the mode that the mutant should be seen in, or in another."""
    plan = plan_of(kernel, mutant.case)
    mode = mode or ("check" if mutant.seen else "fast")
    return decode(case_of(mutant.case), plan, mode, edit=breaking(kernel, mutant))


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """Compiles all mutants, and what they were made of, on all cores."""
    wanted: dict[str, set[str]] = {"check": set(), "fast": set()}
    for kernel, name in WHOLE:
        launches = decode(case_of(name), plan_of(kernel, name), "dry").launches
        wanted["fast"] |= {launch.text for launch in launches}
    for kernel, mutant, *_ in (parameters.values for parameters in ALL):
        with suppress(AssertionError):  # of a mutant that lost its place: its own test will say so
            launches = run(kernel, mutant, "dry").launches
            wanted["check" if mutant.seen else "fast"] |= {launch.text for launch in launches}
    with ThreadPoolExecutor() as pool:  # each mode first builds a runtime, on one core
        list(pool.map(msl.prepare, wanted.values(), wanted))


def verdict(name: str, done: Decoded, plan: Plan) -> str:
    """What is wrong with the answer; "" if nothing is."""
    case = case_of(name)
    if name in UNREADABLE:
        return "" if np.isnan(np.asarray(done.out)).all() else "memory out of steps was read"
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


@pytest.mark.parametrize(("kernel", "name"), WHOLE)
def test_whole_kernels_are_right(kernel: str, name: str) -> None:
    """Else the verdicts above would mean nothing."""
    plan = plan_of(kernel, name)
    assert not verdict(name, decode(case_of(name), plan, "fast"), plan)


@pytest.mark.parametrize(("kernel", "mutants"), [("matrix", MATRIX), ("vector", VECTOR)])
def test_every_barrier_has_its_mutant(kernel: str, mutants: list[Mutant]) -> None:
    text = decode(case_of("paged"), plan_of(kernel, "paged"), "dry").launches[0].text
    barriers = len(re.findall(r"threadgroup_barrier\(", text))
    assert barriers == sum(mutant.seen == UNORDERED for mutant in mutants)
