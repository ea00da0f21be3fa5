"""The stand-in for mx.fast.metal_kernel: MLX's very text, MLX's arguments, MLX's refusals."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tools import msl
from tools.msl import compiler, stand_in
from tools.msl.translate import BUILTINS

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

# Merges the pieces of a split decode by their log-sum-exp: one simdgroup a row.
MERGE = """
  const uint row = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup;
  const int pieces = partial_shape[1], rank = partial_shape[2];
  const device float* my_lse = lse + row * lse_strides[0];
  float largest = -INFINITY;
  for (int i = lane; i < pieces; i += 32) {
    largest = max(largest, my_lse[i * lse_strides[1]]);
  }
  largest = simd_max(largest);
  for (int c = lane; c < rank; c += 32) {
    float sum = 0.0f, total = 0.0f;
    for (int i = 0; i < pieces; i++) {
      const float w = exp(my_lse[i * lse_strides[1]] - largest);
      const int at = (row * pieces + i) * rank + c;
      total += w;
      sum += w * partial[elem_to_loc(at, partial_shape, partial_strides, partial_ndim)];
    }
    merged[row * rank + c] = T(scale * sum / total + bias[c % BIASES]);
  }
  if (WANT_LARGEST && lane == 0) {
    extremes[row] = largest;
  }
"""
ROWS, PIECES, RANK = 5, 40, 96


def merge_inputs() -> list[Any]:
    partial = mx.random.normal((ROWS, PIECES, RANK), key=mx.random.key(0))
    lse = mx.random.normal((PIECES, ROWS), key=mx.random.key(1)).T  # not contiguous
    return [partial, lse, mx.array([1.0, 2.0, 3.0]), 2.5]  # bias: fewer than 8 elements


def merge(dtype: mx.Dtype = mx.float16, inputs: list[Any] | None = None) -> list[mx.array]:
    kernel = mx.fast.metal_kernel(
        name="merge",
        input_names=["partial", "lse", "bias", "scale"],
        output_names=["merged", "extremes"],
        source=MERGE,
        ensure_row_contiguous=False,
    )
    return kernel(
        inputs=inputs or merge_inputs(),
        template=[("T", dtype), ("BIASES", 3), ("WANT_LARGEST", True)],
        grid=(ROWS * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(ROWS, RANK), (ROWS,)],
        output_dtypes=[dtype, mx.float32],
    )


def double(x: Any, source: str = "y[i] = 2 * x[i];", **options: Any) -> mx.array:
    """A launch of a small kernel, of which `options` change what is asked for."""
    made = {
        name: options.pop(name) for name in ("header", "ensure_row_contiguous") if name in options
    }
    kernel = mx.fast.metal_kernel("double", ["x"], ["y"], f"uint i = {POSITION}; {source}", **made)
    asked = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1)}
    shapes = {"output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    (y,) = kernel(**{"inputs": [x], **asked, **shapes, **options})
    return y


POSITION = "thread_position_in_grid.x"
X = mx.arange(64, dtype=mx.float32)


# --- the text ------------------------------------------------------------------------------------


def test_the_signature() -> None:
    with msl.emulated("dry") as launches:
        merge()
    name = "custom_kernel_merge__float16_t_3_1_float_float_floatc_floats_float16_t_float"
    signature = """
        template <typename T, int BIASES, bool WANT_LARGEST>
        [[kernel]] void NAME(
          const device float* partial [[buffer(0)]],
          const constant int* partial_shape [[buffer(1)]],
          const constant int64_t* partial_strides [[buffer(2)]],
          const constant int& partial_ndim [[buffer(3)]],
          const device float* lse [[buffer(4)]],
          const constant int64_t* lse_strides [[buffer(5)]],
          const constant float* bias [[buffer(6)]],
          const constant float& scale [[buffer(7)]],
          device float16_t* merged [[buffer(8)]],
          device float* extremes [[buffer(9)]],
          uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
          uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {"""
    text = launches[0].text
    assert text.startswith(textwrap.dedent(signature).strip().replace("NAME", name))
    instance = f"{name}<float16_t, 3, 1>"
    last = f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    assert text.endswith(last)


CASES: dict[str, dict[str, Any]] = {
    "merge": {
        "inputs": [
            ("partial", (4, 3, 64), mx.float32),
            ("lse", (4, 3), mx.float16),
            ("bias", (3,), mx.bfloat16),
            ("scale", (), mx.float32),
        ],
        "outputs": [("merged", mx.bfloat16), ("extremes", mx.float32)],
        "template": [("T", mx.bfloat16), ("BIASES", 3), ("WANT", True)],
        "source": MERGE,
    },
    "one_output_without_attributes": {
        "inputs": [("x", (), mx.int32), ("y", (0,), mx.uint8)],
        "outputs": [("z", mx.int64)],
        "source": "// x_shape, y_ndim, y_strides",
        "header": "// a header that names thread_position_in_grid\n",
    },
    "one_long_input": {
        "inputs": [("x", (3, 4, 5), mx.uint32)],
        "outputs": [("z", mx.uint32)],
        "source": "// my_x_shape and x_strides, x_ndim; dispatch_threads_per_threadgroup",
    },
    "all_attributes": {
        "inputs": [("x", (7,), mx.bool_), ("y", (8,), mx.uint16), ("z", (2, 4), mx.int8)],
        "outputs": [("a", mx.int16), ("b", mx.uint64), ("c", mx.bool_)],
        "template": [("N", -1)],
        "source": "\n".join(f"// {name}" for name in sorted(BUILTINS)),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_what_mlx_prints(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLX prints it, even without Metal, while a function is exported."""
    case = CASES[name]
    arrays = [mx.zeros(shape, dtype) for _, shape, dtype in case["inputs"]]

    def call(*inputs: mx.array) -> list[mx.array]:
        kernel = mx.fast.metal_kernel(
            name=name,
            input_names=[name for name, _, _ in case["inputs"]],
            output_names=[name for name, _ in case["outputs"]],
            source=case["source"],
            header=case.get("header", ""),
        )
        return kernel(
            inputs=list(inputs),
            template=case.get("template"),
            output_shapes=[(8,)] * len(case["outputs"]),
            output_dtypes=[dtype for _, dtype in case["outputs"]],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            verbose=True,
        )

    mx.export_function(str(tmp_path / "exported"), call, *arrays)
    theirs = capfd.readouterr().out
    with msl.emulated("dry") as launches:
        call(*arrays)
    assert capfd.readouterr().out == theirs
    assert theirs.split("```\n", 1)[1] == launches[0].text + "\n```\n"


def test_a_signature_that_mlx_writes_wrongly_is_refused() -> None:
    with msl.emulated("dry"), pytest.raises(ValueError, match="closes this signature too early"):
        mx.fast.metal_kernel("f", ["x"], ["a", "b"], "// x_shape")(
            inputs=[X],
            output_shapes=[(1,), (1,)],
            output_dtypes=[mx.float32] * 2,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )


def test_a_short_input_is_in_another_address_space() -> None:
    """The trap: what is a device pointer for a long input is a constant pointer for a short one."""
    pytest.importorskip("ziglang", reason="the type check needs zig's clang: pip install ziglang")
    pointer = f"const device float* p = x; y[{POSITION}] = p[0];"
    with msl.emulated("dry") as launches:
        double(X[:8], pointer)
        double(X[:7], pointer)
    long, short = (msl.type_check(launch.text) for launch in launches)
    assert long == ""
    assert "cannot initialize a variable of type 'device float const *'" in short


# --- running -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", compiler.MODES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.float16, 1e-2), (mx.bfloat16, 5e-2)]
)
def test_a_kernel_runs(mode: str, dtype: mx.Dtype, tolerance: float) -> None:
    partial, lse, bias, scale = inputs = merge_inputs()
    with msl.emulated(mode, shuffle=3) as launches:
        merged, extremes = merge(dtype, inputs)
    expected = scale * mx.einsum("rp,rpc->rc", mx.softmax(lse, -1), partial) + mx.tile(
        bias, RANK // 3
    )
    assert merged.dtype == dtype
    assert mx.abs(merged.astype(mx.float32) - expected).max().item() < tolerance
    assert mx.array_equal(extremes, lse.max(1))
    (launch,) = launches
    assert (launch.name, launch.grid, launch.threadgroup) == ("merge", (160, 1, 1), (32, 1, 1))
    assert launch.template == (("T", dtype), ("BIASES", 3), ("WANT_LARGEST", True))
    assert (launch.counts is None) == (mode == "fast")


def test_counts_are_named() -> None:
    with msl.emulated("check") as launches:
        double(X)
    counts = launches[0].counts
    assert counts is not None
    assert counts.read == {"x": 256, "y": 0}
    assert counts.written == {"y": 256}


def test_strided_inputs_are_passed_where_they_lie() -> None:
    long = mx.arange(256, dtype=mx.float32).reshape(64, 4)
    x = long[:, 1]
    with msl.emulated() as launches:
        y = double(x, "y[i] = x[i * x_strides[0]] + x_shape[0];", ensure_row_contiguous=False)
        copied = double(x, "y[i] = x[i] + x_strides[0];")
    assert mx.array_equal(y, x + 64)
    assert mx.array_equal(copied, x + 1)
    where_it_lies, copy = (launch.arguments["x"] for launch in launches)
    assert where_it_lies.strides == (16,)
    assert np.shares_memory(where_it_lies, np.asarray(long))
    assert not np.shares_memory(copy, np.asarray(long))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_slice_starts_where_it_would_in_a_buffer_of_metal(dtype: mx.Dtype) -> None:
    """A buffer starts at a multiple of 16 bytes there, on a CPU behind a header of 8."""
    wide = mx.zeros(4096, dtype)
    mx.eval(wide)
    with msl.emulated():
        for start in (0, 1, 3, 4, 8, 21):
            found = double(wide[start:], "y[i] = float(ulong(x) % 16);", output_dtypes=[mx.float32])
            assert found.tolist()[:2] == [start * dtype.size % 16] * 2


def test_all_buffers_of_a_cpu_start_alike() -> None:
    fresh = [mx.full(size, 1.0) for size in (1, 5, 100, 4096, 10**6)]
    fresh += [mx.array(np.ones(size, np.float16)) for size in (1, 7, 1000)]
    starts = {stand_in.memory_of(array).ctypes.data % 16 for array in fresh}
    assert starts == {stand_in._buffer_start()}


def test_a_load_from_a_slice_that_is_not_aligned_is_reported() -> None:
    load = "y[i] = (*(const device float4*)(x + 4 * i)).x;"
    wide = mx.arange(64, dtype=mx.float32)
    with msl.emulated("check"):
        assert double(wide[4:20], load, grid=(4, 1, 1)).tolist()[:4] == [4, 8, 12, 16]
        with pytest.raises(msl.EmulationError, match="a vector that is not aligned"):
            double(wide[5:21], load, grid=(4, 1, 1))


def test_a_reversed_input_is_refused() -> None:
    with msl.emulated(), pytest.raises(ValueError, match="got a reversed one"):
        double(X[::-1], ensure_row_contiguous=False)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "int32_t"), (0.5, "float"), (True, "bool"), (np.float16(2), "float16_t")],
)
def test_scalars_arrive_by_reference(value: Any, kind: str) -> None:
    with msl.emulated() as launches:
        y = double(value, "y[i] = float(x);")
    assert f"const constant {kind}& x " in launches[0].text
    assert y[0].item() == float(value)


def test_bfloat16_arrives_with_its_strides() -> None:
    x = mx.arange(128, dtype=mx.bfloat16)[::2]
    with msl.emulated() as launches:
        y = double(x, "y[i] = float(x[i * x_strides[0]]);", ensure_row_contiguous=False)
    seen = launches[0].arguments["x"]
    assert (seen.dtype, seen.strides) == (np.uint16, (4,))
    assert mx.array_equal(y, x.astype(mx.float32))


def test_what_is_not_written_is_nan_or_the_initial_value() -> None:
    with msl.emulated():
        nan = double(X, "if (i < 3) y[i] = 1;")
        ones = double(X, "if (i < 3) y[i] = 2;", init_value=1)
        bfloat = double(X, "", output_dtypes=[mx.bfloat16], init_value=3)
    assert mx.isnan(nan).tolist() == [False] * 3 + [True] * 61
    assert ones.tolist() == [2] * 3 + [1] * 61
    assert bfloat.tolist() == [3] * 64


def test_a_threadgroup_is_cut_to_the_grid() -> None:
    with msl.emulated():
        y = double(X, "y[i] = threads_per_threadgroup.x;", grid=(4, 1, 1), threadgroup=(32, 1, 1))
    assert y[:4].tolist() == [4] * 4


def test_an_edit_changes_what_is_compiled() -> None:
    with msl.emulated(edit=lambda text: text.replace("2 * x", "3 * x")) as launches:
        y = double(X)
    assert mx.array_equal(y, 3 * X)
    assert "3 * x" in launches[0].text


def test_a_fault_names_the_kernel_and_leaves_no_launch() -> None:
    with msl.emulated("check") as launches:
        with pytest.raises(msl.EmulationError, match=r"double: out of bounds: .*kernel.metal:"):
            double(X, "y[i] = x[i + 1];")
        with pytest.raises(msl.SourceError, match=r"kernel.metal:.*not_there"):
            double(X, "y[i] = not_there;")
    assert launches == []


def test_reports_quote_the_statement_of_a_shortened_text() -> None:
    source = (
        "float a=0;for(int k=0;k<3;k++){a+=x[i+k];}if(i<8){a+=simd_sum(a);}y[i]=a;" + "a=0;" * 30
    )
    with msl.emulated("check") as launches:
        with pytest.raises(msl.EmulationError) as caught:
            double(X, source)
        with pytest.raises(msl.EmulationError, match="divergence"):
            double(X[:1], source, grid=(32, 1, 1))
    assert launches == []
    reports = str(caught.value).splitlines()
    assert "divergence: " in reports[0]
    assert "`a+=simd_sum(a);`" in reports[0]
    assert any(line.endswith("`a+=x[i+k];`") for line in reports)


# --- refusals ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "too many threads": (
        lambda: double(X, threadgroup=(32, 33, 1)),
        "at most 1024 threads a threadgroup; got 1056",
    ),
    "an empty grid": (lambda: double(X, grid=(0, 1, 1)), "a grid that is not empty"),
    "too many inputs": (lambda: double(X, inputs=[X, X]), "`inputs` to have 1 members; got 2"),
    "no shapes": (lambda: double(X, output_shapes=[]), "`output_shapes` to have 1 members; got 0"),
    "no dtypes": (lambda: double(X, output_dtypes=[]), "`output_dtypes` to have 1 members; got 0"),
    "a CPU stream": (lambda: double(X, stream=mx.cpu), "a stream of the GPU; got"),
    "a complex input": (lambda: double(X.astype(mx.complex64)), "a dtype .* got .*complex64"),
    "a float for a template": (
        lambda: double(X, template=[("A", 0.5)]),
        "a dtype, int or bool .*; got 0.5",
    ),
    "no outputs": (lambda: mx.fast.metal_kernel("f", ["x"], [], ""), "at least one output"),
    "atomic outputs": (
        lambda: mx.fast.metal_kernel("f", ["x"], ["y"], "", atomic_outputs=True),
        "not emulated",
    ),
    "fast maths": (
        lambda: mx.fast.metal_kernel("f", ["x"], ["y"], "", compile_options={"math_mode": "fast"}),
        "not emulated",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    call, message = REFUSED[what]
    with msl.emulated(), pytest.raises(ValueError, match=message):
        call()


def test_the_limit_of_threads_is_the_device_s() -> None:
    with msl.emulated(thread_limit=448):
        double(X, threadgroup=(448, 1, 1))
        with pytest.raises(ValueError, match="at most 448 threads a threadgroup; got 512"):
            double(X, threadgroup=(512, 1, 1))


def test_a_stream_of_the_gpu_is_taken() -> None:
    with msl.emulated():
        assert mx.array_equal(double(X, stream=mx.gpu), 2 * X)


def test_the_stand_in_goes_away() -> None:
    original = mx.fast.metal_kernel
    with pytest.raises(ZeroDivisionError), msl.emulated():
        1 / (mx.fast.metal_kernel is original)
    assert mx.fast.metal_kernel is original


def test_unknown_modes_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected a mode of .*; got 'slow'"):
        msl.build("", "slow")
    with pytest.raises(ValueError, match="got 'slow'"), msl.emulated("slow"):
        pass


# --- building ------------------------------------------------------------------------------------


def test_a_dry_run_gives_the_texts_to_prepare() -> None:
    with msl.emulated("dry") as launches:
        y = double(X, "y[i] = 5 * x[i];")
    assert y.tolist() == [0] * 64
    msl.prepare((launch.text for launch in launches * 2), "fast")
    msl.prepare([], "check")
    with pytest.raises(msl.SourceError, match="not_there"):
        msl.prepare([launches[0].text.replace("5 *", "not_there *")], "fast")


def test_builders_at_once_get_one_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "BUILD", tmp_path / "build")
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: compiler._compile("int x;", []), range(8)))
    assert [path.stat().st_size > 0 for path in made] == [True]
    with pytest.raises(msl.SourceError, match="expected"):
        compiler._compile("int", [])
    assert list((tmp_path / "build").iterdir()) == list(made)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("platform.system", lambda: "Darwin"), "needs Linux on x86-64"),
        (
            ("pathlib.Path.read_text", lambda path: "flags: sse2"),
            "with avx2, f16c, fma",
        ),
        (("shutil.which", lambda name: None), r"needs g\+\+ \(12 or later\); none is on the path"),
        (("tools.msl.compiler.version", lambda: "11.4.0"), "12 or later; this is 11.4.0"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_a_machine_that_cannot_run_kernels_says_why(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, Any], reason: str
) -> None:
    compiler.missing.cache_clear()
    monkeypatch.setattr(*change)
    with pytest.raises(RuntimeError, match=reason):
        compiler.shared_library("", "fast")
    monkeypatch.undo()
    compiler.missing.cache_clear()
    assert compiler.missing() == ""


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_memory_is_a_view_of_any_array(dtype: mx.Dtype) -> None:
    whole = mx.zeros((2, 1, 40, 64), dtype)
    row = 64 * dtype.size
    for part, strides in (
        (whole[:, :, :30], (40 * row, 40 * row, row, dtype.size)),
        (whole[:, :, 3:30, :32], (40 * row, 40 * row, row, dtype.size)),
        (whole.swapaxes(1, 2), (40 * row, row, 40 * row, dtype.size)),
        (whole[1:, :, ::2], (40 * row, 40 * row, 2 * row, dtype.size)),
        (mx.broadcast_to(whole, (2, 5, 40, 64)), (40 * row, 0, row, dtype.size)),
    ):
        seen = stand_in.memory_of(part)
        assert seen.strides == strides
        assert seen.shape == part.shape
        assert np.shares_memory(seen, stand_in.memory_of(whole))
