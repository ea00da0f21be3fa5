"""What the harness of the CUDA kernels times, records and passes to the driver; without a GPU."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mla_tuner.backends import cuda_tiles, shaders
from mla_tuner.backends.cuda import CudaBackend
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools.nvrtc import Compiled, Kernel, Nvrtc, find
from tools.peers import choices, driver, ours, recording

ROOT = Path(__file__).parents[1]
SHAPE = Shape(8192, 1, 16)
SPLIT = Plan("split", 64, "r16")


# --- what is timed ---------------------------------------------------------------------------


def test_shapes_of_the_table_and_of_a_text() -> None:
    assert len(choices.shapes_of("")) == 10
    assert choices.shapes_of("1x16x8192,2x20x100,1x16x8192", q_len=2, dtype="float16") == [
        Shape(8192, 1, 16, "float16", q_len=2),
        Shape(100, 2, 20, "float16", q_len=2),
    ]


def test_lengths_take_the_place_of_batch_and_context() -> None:
    (shape,) = choices.shapes_of("1x16x1,8x16x9", lengths="300,70*2")
    assert shape == Shape(300, 3, 16, lengths=(300, 70, 70))
    assert choices.blocks_of(shape) == [5, 2, 2]
    assert choices.label_of(shape) == "3 x 16 x 300 ragged"


def test_labels_name_what_is_unusual() -> None:
    shape = Shape(8192, 1, 16, "float16", q_len=4)
    assert choices.label_of(shape) == "1 x 16 x 8192 q4 float16"
    assert choices.label_of(SHAPE) == "1 x 16 x 8192"


@pytest.mark.parametrize("text", ["16x8192", "1x16x", "0x16x8", "1x16x8k", "1x16x8192;", "1x500x9"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        choices.shapes_of(text)


@pytest.mark.parametrize("text", ["a", "100*", "100*b", ",100"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected lengths"):
        choices.shapes_of("1x16x1", lengths=text)


@pytest.mark.parametrize("shape", choices.shapes_of(""))
def test_caches_are_cold_and_not_more_than_needed(shape: Shape) -> None:
    count = choices.caches_of(shape, 50 << 20)
    assert count == 27
    assert count * shape.cache_bytes >= 3 * (50 << 20)


def test_more_caches_where_they_are_small_and_fewer_where_large() -> None:
    small, large = Shape(1024, 1, 16), Shape(131072, 32, 16)
    assert choices.caches_of(small, 50 << 20) * small.cache_bytes >= 3 * (50 << 20)
    assert choices.caches_of(large, 50 << 20) == 19
    assert choices.caches_of(SHAPE, 50 << 20, wanted=1) == 19


@pytest.mark.parametrize("shape", choices.shapes_of(""))
def test_a_sweep_has_every_useful_tile_and_counts_that_are_what_they_say(shape: Shape) -> None:
    plans = choices.plans_of("sweep", shape, 90, 132)
    assert tuple(dict.fromkeys(plan.tile for plan in plans)) == cuda_tiles.useful(shape, 90)
    assert len(set(plans)) == len(plans) <= 40
    assert all(plan.cut(shape.context) == plan for plan in plans)
    few = choices.plans_of("best", shape, 90, 132)
    assert few == [plan for plan in plans if plan.tile in cuda_tiles.useful(shape, 90)[:2]]


def test_a_sweep_reaches_one_block_a_core_and_leaves_few_idle() -> None:
    counts = [p.partitions for p in choices.plans_of("sweep", Shape(131072, 1, 16), 90, 132)]
    assert 128 in counts
    assert min(counts) * 2 * 4 >= 132  # of r8: two tiles of rows


def test_named_plans_are_cut_to_the_context_and_come_once() -> None:
    assert choices.plans_of("r16:128,r16:200,r16:1,r8:64", SHAPE, 90, 132) == [
        Plan("split", 128, "r16"),
        Plan("single", 1, "r16"),
        Plan("split", 64, "r8"),
    ]


@pytest.mark.parametrize("text", ["r16", "r16:", "r16:x", "all", "r16:999", "r16:0"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        choices.plans_of(text, SHAPE, 90, 132)


def test_a_plan_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"r16:2 can't run on .* needs sm_90"):
        choices.plans_of("r16:2", SHAPE, 80, 108)


# --- what MLX would launch -------------------------------------------------------------------


def recorded(plan: Plan, shape: Shape) -> list[recording.Launch]:
    return recording.launches_of(plan, shape, recording.stand_ins(shape), 0.07)


def test_both_launches_of_a_split_call_are_recorded() -> None:
    decode, merge = recorded(SPLIT, SHAPE)
    assert decode.blocks == (1, 1, 64)
    assert decode.threads == (288, 1, 1)
    assert decode.kernel.shared_memory > 48000
    pointers = [each.name for each in decode.parameters if each.kind == "pointer"]
    assert pointers == [*decode.kernel.inputs, *(name for name, _, _ in decode.outputs)]
    for name in ("q_nope", "q_pe", "latent", "block_table"):
        assert decode.arrays[name].origin == "given"
        assert decode.arrays[name].key == name
    assert decode.arrays["latent"].shape == (128, 64, 576)
    assert decode.arrays["latent"].strides == (64 * 576, 576, 1)
    assert decode.arrays["latent"].dtype == "bfloat16"
    made = [array.result for array in merge.arrays.values() if array.origin == "made"]
    assert made == [(0, 0)]
    assert merge.outputs[0][1:] == ((1, 16, 1, 512), "bfloat16")


def test_a_single_call_is_one_launch() -> None:
    (launch,) = recorded(Plan("single", 1, "r16"), SHAPE)
    assert launch.outputs[0][1:] == ((1, 16, 1, 512), "bfloat16")


@pytest.mark.parametrize("tile", cuda_tiles.TILES)
def test_every_tile_is_recorded(tile: str) -> None:
    dtype = "float32" if tile == "r8f" else "float16"
    launches = recorded(Plan("split", 3, tile), Shape(300, 2, 20, dtype, q_len=2))
    assert [len(each.parameters) >= 4 for each in launches] == [True, True]


def test_numbers_of_the_call_are_kept_with_all_that_lies_behind_a_view() -> None:
    shape = Shape(300, 3, 16, lengths=(300, 70, 1))
    decode, _ = recorded(Plan("split", 3, "r16"), shape)
    numbers = [array for array in decode.arrays.values() if array.origin == "numbers"]
    assert {300, 70, 1} <= {int(n) for array in numbers for n in array.contents.flatten()}


def test_nothing_of_an_earlier_call_is_taken_for_this_one() -> None:
    shape = Shape(300, 3, 16, lengths=(300, 70, 1))
    first, second = (recorded(Plan("split", 3, "r16"), shape)[0] for _ in range(2))
    for name, array in first.arrays.items():
        if array.origin == "numbers":
            assert array.contents.tolist() == second.arrays[name].contents.tolist()


def test_an_array_that_is_not_the_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = CudaBackend._inputs

    def copied(self: CudaBackend, *given: Any) -> list[mx.array]:
        first, *rest = passed(self, *given)
        return [mx.zeros((1, 128, 1, 1 << 10), first.dtype), *rest]

    monkeypatch.setattr(CudaBackend, "_inputs", copied)
    with pytest.raises(ValueError, match="q_nope is no array of the call"):
        recorded(SPLIT, SHAPE)


def test_views_at_an_offset_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = CudaBackend._inputs

    def shifted(self: CudaBackend, *given: Any) -> list[mx.array]:
        first, *rest = passed(self, *given)
        return [mx.as_strided(first, (1, 1, 1, 1), (1, 1, 1, 1), offset=1), *rest]

    monkeypatch.setattr(CudaBackend, "_inputs", shifted)
    with pytest.raises(ValueError, match="an offset"):
        recorded(SPLIT, SHAPE)


def test_recording_leaves_mlx_as_it_was() -> None:
    fast: Any = mx.fast
    before = fast.cuda_kernel, mx.as_strided
    recorded(SPLIT, SHAPE)
    assert (fast.cuda_kernel, mx.as_strided) == before


@pytest.mark.parametrize(
    ("declared", "message"),
    [("const float* other", "belongs to no array"), ("int q_nope_size", "belongs to no array")],
)
def test_a_parameter_without_an_array_is_refused(declared: str, message: str) -> None:
    text = f"__global__ void f({declared}) {{\n}}"
    with pytest.raises(ValueError, match=message):
        recording.parameters_of(kernel("f", text), ("q_nope",))


def test_a_text_without_its_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="declares no kernel g"):
        recording.parameters_of(kernel("g", "__global__ void f() {}"), ())


def kernel(name: str, text: str, shared: int = 0) -> Kernel:
    return Kernel(name, text, (1, 1, 1), (1, 1, 1), shared, ())


def test_a_block_is_no_larger_than_the_grid() -> None:
    launched = kernel("f", "")._replace(grid=(3, 2, 300), threadgroup=(8, 1, 128))
    launch = recording.Launch(launched, (), {}, ())
    assert launch.threads == (3, 1, 128)
    assert launch.blocks == (1, 2, 3)


# --- other texts -----------------------------------------------------------------------------


def copied_shaders(folder: Path) -> Path:
    """A copy of the texts with a line more in each."""
    (folder / "cuda").mkdir(parents=True)
    for path in (ROOT / "shaders/cuda").iterdir():
        (folder / "cuda" / path.name).write_text(f"// another\n{path.read_text()}")
    return folder


def test_a_variant_in_a_folder_has_its_own_texts(tmp_path: Path) -> None:
    variant = ours.Variant.of(f"new={copied_shaders(tmp_path / 'new')}")
    folders = shaders._FOLDERS
    plain, new = (ours.planned(each, SHAPE, [SPLIT]) for each in (ours.Variant(), variant))
    assert folders == shaders._FOLDERS
    assert variant.name == "new"
    assert not set(plain[0].texts) & set(new[0].texts)
    assert ours.planned(ours.Variant(), SHAPE, [SPLIT])[0].texts == plain[0].texts


def test_a_folder_without_shaders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder of shaders"):
        ours.planned(ours.Variant.of(f"new={tmp_path}"), SHAPE, [SPLIT])


def test_a_variant_by_constants_replaces_them_or_puts_them_in_front() -> None:
    variant = ours.Variant.of("b=STAGES=3,SHARED=99,NEW=1")
    text = "#define STAGES 2\n#define SHARED 50\nint STAGES_LEFT;\n"
    changed = variant.changed(kernel("f", text, shared=50))
    assert changed.text == "#define NEW 1\n#define STAGES 3\n#define SHARED 99\nint STAGES_LEFT;\n"
    assert changed.shared_memory == 99
    assert ours.Variant().changed(kernel("f", text, shared=50)) == kernel("f", text, shared=50)


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a=/nowhere", "ours=X=1", "a=X=1=2", "a==1"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=FOLDER"):
        ours.Variant.of(text)


class Compiler:
    """Notes what it is given; a text with "wrong" in it doesn't compile."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def compile(self, text: str, name: str, architecture: str) -> Compiled:
        self.names.append(f"{name} {architecture}")
        if "wrong" in text:
            raise ValueError("it is wrong")
        return Compiled(b"", 168, 8, "")


def work(name: str, text: str, plan: Plan = SPLIT) -> ours.Planned:
    launch = recording.Launch(kernel(name, text), (), {}, ())
    return ours.Planned(ours.Variant(), plan, (launch,))


def test_each_text_is_compiled_once(capsys: pytest.CaptureFixture[str]) -> None:
    kernels, compiler = ours.Kernels("sm_90a"), Compiler()
    kernels.__dict__["_compiler"] = compiler
    right, wrong = work("f", "right"), work("g", "wrong")
    kernels.compile([right, right, wrong])
    kernels.compile([right])
    assert sorted(compiler.names) == ["f sm_90a", "g sm_90a"]
    assert kernels.failure(right) is None
    assert kernels.failure(wrong) == "it is wrong"
    assert capsys.readouterr().err == "f: 168 registers, 8 bytes spilled\n"


# --- the driver ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "numbers", "expected"),
    [
        ("pointer", [1 << 63], struct.pack("<Q", 1 << 63)),
        ("shape", [7, -2], struct.pack("<10i", 7, -2, *[0] * 8)),
        ("strides", [1 << 40, -5], struct.pack("<10q", 1 << 40, -5, *[0] * 8)),
        ("ndim", [3, 4, 5], struct.pack("<i", 3)),
    ],
)
def test_parameters_lie_in_memory_as_mlx_has_them(
    kind: str, numbers: list[int], expected: bytes
) -> None:
    assert bytes(driver.packed(kind, numbers)) == expected


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 10 dimensions; got 11"):
        driver.packed("strides", [1] * 11)


def test_pointers_lead_to_the_values() -> None:
    arguments = driver.Arguments([driver.packed("pointer", [5]), driver.packed("shape", [6])])
    assert ctypes.c_uint64.from_address(arguments.pointers[0] or 0).value == 5
    assert ctypes.c_int32.from_address(arguments.pointers[1] or 0).value == 6


def test_a_kernel_is_found_by_its_mangled_name() -> None:
    library = find()
    if library is None:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    text = "namespace mlx::core::cu { __global__ void some_name(int* out) { *out = 1; } }"
    code = Nvrtc(library).compile(text, "some_name", "sm_90a").code
    assert driver.mangled_name(code, "some_name") == b"_ZN3mlx4core2cu9some_nameEPi"
    with pytest.raises(ValueError, match="no kernel some_nam"):
        driver.mangled_name(code, "some_nam")
