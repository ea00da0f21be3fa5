"""The emulated language and library against numpy and MLX, in both modes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tools import msl
from tools.msl.stand_in import memory_of

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]
MODES = pytest.mark.parametrize("mode", msl.compiler.MODES)
OUT = "device float* out"


def run(
    parameters: str,
    body: str,
    buffers: list[np.ndarray],
    mode: str = "check",
    threads: tuple[int, int, int] = (32, 1, 1),
    group_size: tuple[int, int, int] = (32, 1, 1),
    shuffle: int | None = None,
) -> None:
    """`parameters`: the buffers in order, without attributes, then those that have one."""
    listed = [
        p if "[[" in p else f"{p} [[buffer({i})]]" for i, p in enumerate(parameters.split(","))
    ]
    text = f"[[kernel]] void f({', '.join(listed)}) {{\n{body}\n}}\n"
    msl.build(text, mode).run(buffers, threads, group_size, shuffle)


@MODES
@pytest.mark.parametrize(("name", "dtype"), [("half", mx.float16), ("bfloat", mx.bfloat16)])
def test_sixteen_bit_types_round_after_each_operation(
    mode: str, name: str, dtype: mx.Dtype
) -> None:
    a, b, c = (mx.random.normal((32,), dtype, key=mx.random.key(i)) for i in range(3))
    out = np.array(memory_of(mx.zeros((4, 32), dtype)))
    run(
        f"const device {name}* a, const device {name}* b, const device {name}* c,"
        f"device {name}* out, uint i [[thread_position_in_grid]]",
        f"""
          const {name} product = a[i] * b[i];
          out[i] = product + c[i];
          out[32 + i] = {name}(float(a[i]) * float(b[i]) + float(c[i]));
          {name} sum = a[i];
          sum += b[i];
          out[64 + i] = sum / c[i];
          out[96 + i] = (a[i] * b[i] + c[i]) * a[i] - b[i];
        """,
        [*map(memory_of, (a, b, c)), out],
        mode,
    )
    wide = (x.astype(mx.float32) for x in (a, b, c))
    assert np.array_equal(out[0], memory_of(a * b + c))
    assert np.array_equal(out[1], memory_of((next(wide) * next(wide) + next(wide)).astype(dtype)))
    assert np.array_equal(out[2], memory_of((a + b) / c))
    assert np.array_equal(out[3], memory_of((a * b + c) * a - b))


@MODES
def test_simdgroup_operations(mode: str) -> None:
    x = np.arange(32, dtype=np.float32) * 3 % 17
    out = np.zeros((10, 32), np.float32)
    run(
        f"const device float* x, {OUT}, ushort i [[thread_index_in_simdgroup]]",
        """
          out[i] = simd_sum(x[i]);
          out[32 + i] = simd_max(x[i]);
          out[64 + i] = simd_min(x[i]);
          out[96 + i] = simd_shuffle_xor(x[i], 5);
          out[128 + i] = simd_shuffle_down(x[i], 2);
          out[160 + i] = simd_broadcast(x[i], 7);
          out[192 + i] = simd_shuffle(x[i], 31 - i);
          out[224 + i] = simd_all(x[i] >= 0.0f) && !simd_any(x[i] > 16.0f);
          out[256 + i] = simd_shuffle_up(x[i], 3);
          out[288 + i] = simd_broadcast_first(x[i] + 1.0f) + simd_product(x[i] > 0 ? 1.0f : 2.0f);
        """,
        [x, out],
        mode,
    )
    lanes = np.arange(32)
    assert np.all(out[0] == x.sum())
    assert np.all(out[1] == x.max())
    assert np.all(out[2] == x.min())
    assert np.array_equal(out[3], x[lanes ^ 5])
    assert np.array_equal(out[4, :30], x[2:])
    assert np.isnan(out[4, 30:]).all()  # lanes 32 and 33 are not there
    assert np.all(out[5] == x[7])
    assert np.array_equal(out[6], x[::-1])
    assert np.all(out[7] == 1)
    assert np.array_equal(out[8, 3:], x[:-3])
    assert np.all(out[9] == x[0] + 1 + 2 ** np.sum(x == 0))


@MODES
def test_simdgroup_matrix(mode: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((8, 24)).astype(np.float16) for _ in range(2))
    out = np.full((2, 8, 8), np.nan, np.float32)
    run(
        f"const device half* a, const device half* b, {OUT}",
        """
          simdgroup_float8x8 sum = simdgroup_float8x8(1.0f);  // identity
          for (int k = 0; k < 24; k += 8) {
            simdgroup_half8x8 left, right;
            simdgroup_load(left, a, 24, ulong2(k, 0));
            simdgroup_load(right, b + k, 24, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sum, left, right, sum);
          }
          simdgroup_store(sum, out, 8);
          simdgroup_multiply(sum, sum, make_filled_simdgroup_matrix<float, 8, 8>(1.0f));
          simdgroup_store(sum, out + 64, 8, ulong2(0, 0), true);
        """,
        [a, b, out],
        mode,
    )
    expected = a.astype(np.float64) @ b.astype(np.float64).T + np.eye(8)
    assert np.abs(out[0] - expected).max() < 1e-5
    assert np.abs(out[1] - expected.sum(1)).max() < 1e-4


@MODES
def test_the_elements_that_a_lane_holds(mode: str) -> None:
    out = np.zeros((2, 64), np.float32)
    run(
        f"const device float* x, {OUT}, ushort lane [[thread_index_in_simdgroup]]",
        """
          simdgroup_float8x8 m;
          simdgroup_load(m, x, 8);
          out[2 * lane] = m.thread_elements()[0];
          out[2 * lane + 1] = m.thread_elements()[1];
          m.thread_elements()[0] = lane;
          m.thread_elements()[1] = lane;
          simdgroup_store(m, out + 64, 8);
        """,
        [np.arange(64, dtype=np.float32), out],
        mode,
    )
    lane = np.arange(32)
    row = (lane >> 2 & 4) | (lane >> 1 & 3)
    column = 2 * ((lane >> 2 & 2) | (lane & 1))
    assert np.array_equal(out[0], np.stack([8 * row + column, 8 * row + column + 1], 1).reshape(-1))
    assert np.array_equal(out[1, 8 * row + column + 1], lane)


@MODES
def test_a_grid_of_threads_has_smaller_groups_at_its_edge(mode: str) -> None:
    out = np.full((5, 70, 4), -1, np.int32)
    run(
        """device int4* out, uint3 at [[thread_position_in_grid]], uint3 grid [[threads_per_grid]],
           uint3 size [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
           uint3 nominal [[dispatch_threads_per_threadgroup]],
           uint i [[thread_index_in_threadgroup]]""",
        """
          out[at.y * grid.x + at.x] =
              int4(size.x, size.y, nominal.x * 100 + nominal.y, groups.x * 100 + groups.y);
          if (i != at.x % 32 + at.y % 2 * size.x) out[0] = int4(0);
        """,
        [out],
        mode,
        threads=(70, 5, 1),
        group_size=(32, 2, 1),
    )
    columns, rows = np.meshgrid(np.arange(70), np.arange(5))
    assert np.array_equal(out[..., 0], np.where(columns < 64, 32, 6))
    assert np.array_equal(out[..., 1], np.where(rows < 4, 2, 1))
    assert np.all(out[..., 2] == 3202)
    assert np.all(out[..., 3] == 303)


@MODES
@pytest.mark.parametrize("shuffle", [None, 0, 1])
def test_threadgroup_memory_and_barriers(mode: str, shuffle: int | None) -> None:
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    out = np.full(1024, np.nan, np.float32)
    run(
        f"const device float* x, {OUT}, uint i [[thread_index_in_threadgroup]]",
        """
          threadgroup float copy[1024], given[1024];
          copy[i] = x[i];
          for (uint stride = 512; stride > 0; stride /= 2) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (i < stride) copy[i] = max(copy[i], copy[i + stride]);
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
          given[i] = copy[0] - x[i];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[i] = given[1023 - i];
        """,
        [x, out],
        mode,
        threads=(1024, 1, 1),
        group_size=(1024, 1, 1),
        shuffle=shuffle,
    )
    assert np.array_equal(out, (x.max() - x)[::-1])


def test_the_standard_library() -> None:
    calls = {
        "exp(x)": np.exp,
        "exp2(x)": np.exp2,
        "log(x)": np.log,
        "log2(x)": np.log2,
        "sqrt(x)": np.sqrt,
        "rsqrt(x)": lambda x: 1 / np.sqrt(x),
        "floor(x)": np.floor,
        "ceil(x)": np.ceil,
        "trunc(-x)": lambda x: np.trunc(-x),
        "rint(x)": np.rint,
        "fabs(-x)": np.abs,
        "abs(-x)": np.abs,
        "sin(x) + cos(x) + tanh(x)": lambda x: np.sin(x) + np.cos(x) + np.tanh(x),
        "pow(x, 1.5f)": lambda x: x**1.5,
        "ldexp(x, 3)": lambda x: x * 8,
        "clamp(x, 1.0f, 2.0f)": lambda x: np.clip(x, 1, 2),
        "select(x, 7.0f, x > 1)": lambda x: np.where(x > 1, 7, x),
        "fma(x, x, 2.0f)": lambda x: x * x + 2,
        "dot(float2(x, 2), float2(x, 3))": lambda x: x * x + 6,
        "float(as_type<uint>(x) == as_type<uint>(+x))": np.ones_like,
        "float(isinf(INFINITY) && isnan(NAN) && isfinite(x))": np.ones_like,
        "float(exp(half(x)))": lambda x: np.exp(x.astype(np.float16)).astype(np.float32),
    }
    x = np.linspace(0.1, 4, 32, dtype=np.float32)
    out = np.zeros((len(calls), 32), np.float32)
    lines = [f"out[{32 * i} + at] = {call};" for i, call in enumerate(calls)]
    run(
        f"const device float* given, {OUT}, uint at [[thread_position_in_grid]]",
        "const float x = given[at];\n" + "\n".join(lines),
        [x, out],
    )
    for row, (call, function) in zip(out, calls.items(), strict=True):
        np.testing.assert_allclose(row, function(x), rtol=2e-6, err_msg=call)


def test_literals_are_floats() -> None:
    out = np.zeros(32, np.float32)
    run(
        f"{OUT}, uint i [[thread_position_in_grid]]",
        "out[i] = sizeof(0.1) + (0.1 + 0.2 == 0.1f + 0.2f);",
        [out],
    )
    assert np.all(out == 5)


def test_a_strided_input_is_passed_as_it_lies_in_memory() -> None:
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    out = np.zeros(4, np.float32)
    run(
        f"const device float* x, {OUT}, uint i [[thread_position_in_grid]]",
        "out[i] = x[16 * i];",
        [x[::2, :1], out],
        threads=(4, 1, 1),
        group_size=(4, 1, 1),
    )
    assert out.tolist() == [0, 16, 32, 48]


def test_a_scalar_of_the_wrong_size_is_reported() -> None:
    with pytest.raises(msl.EmulationError, match=r"wrong size: buffer 0 \(x\) has 8 bytes"):
        run(
            f"constant float& x, {OUT}",
            "out[0] = x;",
            [np.array(1.0), np.zeros(1, np.float32)],
        )


def test_a_function_that_is_missing_is_a_compile_error() -> None:
    with pytest.raises(msl.SourceError, match=r"kernel.metal:2:.*atan_of.* was not declared"):
        run(OUT, "out[0] = atan_of(out[1]);", [])
