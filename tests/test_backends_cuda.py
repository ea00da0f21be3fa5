"""The CUDA back end without a GPU: tiles, grids, texts, and every way to be refused."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from launches import Launch, nans, raising, zeros

from mla_tuner import device, mla_decode, ops, verify
from mla_tuner.backends import cuda, jit
from mla_tuner.backends.cuda import CudaBackend
from mla_tuner.backends.jit import JitBackend
from mla_tuner.backends.shaders import Text
from mla_tuner.cases import make_case
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import (
    DTYPES,
    GEOMETRIES,
    Shape,
    piece_tokens,
)

SHAPE = Shape(300, 1, 16)
DEFAULT = "r16"


# --- texts


def test_the_digest_follows_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CudaBackend().digest()
    assert len(before) == 16
    assert CudaBackend().digest() == before
    monkeypatch.setattr(cuda, "text", lambda header, body: Text("a", "b"))
    assert CudaBackend().digest() != before


# --- refusals: MLX stands in for one with CUDA, its kernels for whatever a GPU might do


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaBackend]:
    """A back end that finds an H200, where calling any kernel calls the given function."""

    def make(launch: Launch, architecture: str = "sm_90") -> CudaBackend:
        info = {"device_name": "NVIDIA H200", "architecture": architecture, "total_memory": 1 << 37}
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device, "_gpu", lambda: ("cuda", info))
        monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **options: launch)
        return CudaBackend()

    return make


@pytest.mark.parametrize("path", ["single", "split"])
@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (zeros, "is wrong by 1.0e+00"),
        (nans, "is wrong by nan"),
        (
            raising(RuntimeError("Failed to compile kernel:\n  error")),
            "RuntimeError: Failed to compile kernel: error",
        ),
        (raising(MemoryError("out of memory")), "MemoryError: out of memory"),
    ],
)
def test_a_kernel_that_fails_here_is_refused_with_the_reason(
    gpu: Callable[..., CudaBackend], launch: Launch, reason: str, path: str
) -> None:
    backend = gpu(launch)
    plan = Plan(path, 2 if path == "split" else 1, DEFAULT)
    found = backend.refusal(plan, SHAPE)
    assert found is not None
    assert found.startswith(f"tile {DEFAULT} failed its check here")
    assert reason in found
    assert backend.refusal(MLX, SHAPE) is backend.refusal(Plan("mlx_rows"), SHAPE) is None
    passed, why = backend.self_check()
    assert not passed
    assert "failed its check here" in why


def test_a_check_is_made_once(gpu: Callable[..., CudaBackend]) -> None:
    calls: list[object] = []

    def launch(**options: Any) -> list[mx.array]:
        calls.append(options)
        return zeros(**options)

    backend = gpu(launch)
    for _ in range(3):
        assert backend.refusal(Plan("split", 2, "r8"), SHAPE)
        assert backend.refusal(Plan("split", 5, "r8"), Shape(9000, 2, 4))
    assert len(calls) == 2  # one pass and its merge


def test_an_lse_is_proven_only_where_it_is_wanted(
    gpu: Callable[..., CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split's takes a merge of its own, whose compilation nobody else is to wait for."""
    proven: list[tuple[str, bool]] = []

    def fault(backend: object, plan: Plan, *given: Any) -> str | None:
        proven.append((plan.path, given[-1]))
        return "its LSE is wrong" if proven[-1] == ("split", True) else None

    monkeypatch.setattr(jit, "fault", fault)
    backend, split, single = gpu(zeros), Plan("split", 2, "r8"), Plan("single", 1, "r8")
    for _ in range(2):
        assert backend.refusal(split, SHAPE) is None
        assert str(backend.refusal(split, SHAPE, want_lse=True)).endswith("its LSE is wrong")
        assert backend.refusal(single, SHAPE) is backend.refusal(single, SHAPE, True) is None
    assert proven == [("split", False), ("split", True), ("single", True)]
    monkeypatch.setattr(ops, "_backend", lambda: backend)
    case = make_case(SHAPE)
    given = case.q_nope, case.q_pe, case.cache
    with pytest.raises(ValueError, match="its LSE is wrong"):
        mla_decode(*given, scale=case.scale, plan=split, return_lse=True)
    mla_decode(*given, scale=case.scale, plan=split)


def test_verify_fails_with_the_reason_where_every_tile_is_refused(
    gpu: Callable[..., CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = gpu(zeros)
    monkeypatch.setattr(ops, "_backend", lambda: backend)
    found = [check for check in verify.check_kernels(backend) if check.isa != "mlx"]
    assert found
    assert not any(check.ok for check in found)
    assert all("failed its check here" in check.reason for check in found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(mx.cuda, "is_available", lambda: False), "no CUDA back end"),
        (lambda patch: patch.setattr(device, "_gpu", lambda: ("", {})), "no NVIDIA GPU"),
        (lambda patch: patch.delattr(mx.fast, "cuda_kernel"), "has no mx.fast.cuda_kernel"),
        (
            lambda patch: patch.setattr(cuda, "text", raising(FileNotFoundError("gone"))),
            "are not installed: reinstall mla-tuner",
        ),
    ],
)
def test_without_kernels_only_mlx_runs(
    gpu: Callable[..., CudaBackend],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    backend = gpu(zeros)
    change(monkeypatch)
    assert_only_mlx_runs(backend, reason)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_70", "unknown"])
def test_an_older_gpu_runs_only_mlx(gpu: Callable[..., CudaBackend], architecture: str) -> None:
    assert_only_mlx_runs(gpu(zeros, architecture), f"the kernels need sm_80; got {architecture}")


def assert_only_mlx_runs(backend: CudaBackend, reason: str) -> None:
    able, why = backend.available()
    assert not able
    assert reason in why
    assert backend.self_check() == (False, why)
    assert backend.refusal(Plan("split", 2), SHAPE) == why
    assert backend.refusal(MLX, SHAPE) is None
    assert backend.tiles(SHAPE) == ()


# --- launches


@pytest.fixture
def launches(
    gpu: Callable[..., CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What `mla_decode` asks MLX for: how kernels are made, then how they are launched."""
    found: list[dict[str, Any]] = []

    def launch(**options: Any) -> list[mx.array]:
        found.append(options)
        return zeros(**options)

    def cuda_kernel(**options: Any) -> Launch:
        found.append(options)
        return launch

    backend = gpu(launch)
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(CudaBackend, "_tried", lambda *_: None)
    monkeypatch.setattr(ops, "_backend", lambda: backend)
    return found


def decode(shape: Shape, plan: Plan, **options: Any) -> mx.array:
    case = make_case(shape, **options)
    return mla_decode(case.q_nope, case.q_pe, case.cache, scale=0.5, plan=plan)


def test_the_cache_is_never_copied(launches: list[dict[str, Any]]) -> None:
    for name in ("r16", "r64w", "r16p"):
        decode(SHAPE, Plan("split", 2, name))
    made = [each for each in launches if "ensure_row_contiguous" in each]
    assert len(made) == 4  # three tiles and a merge
    assert not any(each["ensure_row_contiguous"] for each in made)


def test_lengths_strides_and_partitions_make_no_new_kernel(launches: list[dict[str, Any]]) -> None:
    shapes = (SHAPE, Shape(4000, 3, 20, lengths=(1, 4000, 0)), Shape(100, 2, 9, q_len=3))
    for shape, partitions in product(shapes, (1, 2, 5)):
        path = "split" if partitions > 1 else "single"
        decode(shape, Plan(path, partitions, DEFAULT), block_size=8 * partitions)
    names = [each["name"] for each in launches if "name" in each]
    assert len(names) == len(set(names)) == 3  # the tile with an LSE and without one, the merge


def numbers(info: mx.array) -> list[int]:
    """What the kernels find as the strides of that array."""
    mx.eval(info)
    return [stride // 4 for stride in memoryview(info).strides or ()]


def test_the_layers_of_a_step_are_worked_out_once(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of one step is kept for the next."""
    prepared: list[Plan] = []

    def prepare(self: CudaBackend, plan: Plan, shape: Shape, want_lse: bool) -> Any:
        prepared.append(plan)
        return JitBackend._prepared(self, plan, shape, want_lse)

    monkeypatch.setattr(CudaBackend, "_prepared", prepare)
    plans = Plan("split", 2, DEFAULT), Plan("single", 1, DEFAULT)
    for context, plan in product((300, 400, 300), plans):
        case = make_case(Shape(context, 1, 16))
        for _ in range(4):
            launches.clear()
            mla_decode(case.q_nope, case.q_pe, case.cache, scale=0.5, plan=plan)
            grids = [each for each in launches if "grid" in each]
            assert len(grids) == plan.partitions
            assert grids[0]["grid"] == (288, 1, plan.partitions)
            assert numbers(grids[0]["inputs"][-1])[0] == piece_tokens(context, plan.partitions)
            run = ops.last_run()
            assert run is not None
            assert run.executed == plan
    assert len(prepared) == 6


def test_one_launch_where_there_is_one_piece(launches: list[dict[str, Any]]) -> None:
    out = decode(SHAPE, Plan("single", 1, DEFAULT))
    (launch,) = [each for each in launches if "grid" in each]
    assert out.shape == launch["output_shapes"][0] == (1, 16, 1, 512)
    assert launch["grid"] == (288, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_answers_are_floats(launches: list[dict[str, Any]], dtype: str) -> None:
    name = "r8f" if dtype == "float32" else DEFAULT
    decode(Shape(300, 2, 16, dtype), Plan("split", 3, name))
    first, second = [each for each in launches if "grid" in each]
    part, info = second["inputs"]
    assert info is first["inputs"][-1]
    assert part.nbytes == 2 * 3 * 16 * (512 + 4) * 4  # and largest score, sum of weights
    assert second["output_shapes"] == [(2, 16, 1, 512)]


def test_an_lse_that_nobody_wants_is_no_output(launches: list[dict[str, Any]]) -> None:
    """Each output costs the host a microsecond or two."""
    case = make_case(SHAPE)
    for return_lse in (False, True):
        launches.clear()
        mla_decode(
            case.q_nope,
            case.q_pe,
            case.cache,
            scale=0.5,
            plan=Plan("split", 2, DEFAULT),
            return_lse=return_lse,
        )
        merge = [each for each in launches if "grid" in each][1]
        assert merge["output_shapes"][1:] == [(1, 16, 1)] * return_lse


def test_one_array_holds_the_numbers_of_a_step(launches: list[dict[str, Any]]) -> None:
    shape = Shape(300, 2, 16, q_len=2, layout="dense", lengths=(300, 70))
    for _ in range(3):
        decode(shape, Plan("split", 3, DEFAULT), starts=(0, 7))
    arrays = [each["inputs"][-1] for each in launches if "grid" in each][::2]
    assert len({id(array) for array in arrays}) == 1
    info = arrays[0]
    found = numbers(info)
    scale = struct.unpack("<f", struct.pack("<i", found[1]))[0]
    assert scale == pytest.approx(0.5 * 1.4426950408889634)
    assert found[0] == piece_tokens(300, 3)
    assert found[2:6] == [32, 2, 1 << 30, 1]
    assert found[6:] == [3, 0, 300, 4]  # room for three pieces a sequence, four are listed
    listed = list(memoryview(mx.as_strided(info, (18,), (1,))))
    assert [listed[at : at + 4] for at in range(0, 16, 4)] == [
        [0, 0, 0, 300],
        [0, 1, 0, 300],
        [1, 0, 7, 70],
        [0, 2, 0, 300],
    ]
    assert listed[16:] == [3, 1]


def test_an_array_of_a_thread_that_has_ended_serves_others(launches: list[dict[str, Any]]) -> None:
    """MLX evaluates a lazy array on a stream of the thread that made it, and there alone."""
    for _ in range(2):  # the second gets the first one's number
        thread = threading.Thread(target=decode, args=(SHAPE, Plan("single", 1, DEFAULT)))
        thread.start()
        thread.join()
    decode(SHAPE, Plan("single", 1, DEFAULT))
    first, _, third = [each["inputs"][-1] for each in launches if "grid" in each]
    assert first is third
    assert numbers(third)[6:] == [1, 0, 300, 0]


def test_sequences_that_are_all_alike_need_no_numbers_in_memory(
    launches: list[dict[str, Any]],
) -> None:
    for starts in ((0, 0), (5, 5)):
        decode(Shape(295, 2, 16, layout="dense"), Plan("split", 3, DEFAULT), starts=starts)
        info = [each["inputs"][-1] for each in launches if "grid" in each][-2]
        assert numbers(info)[6:] == [3, starts[0], 295, 0]


def test_sequences_that_start_apart_are_listed_in_the_grids_order(
    launches: list[dict[str, Any]],
) -> None:
    decode(Shape(100, 3, 16, layout="dense"), Plan("split", 2, DEFAULT), starts=(0, 9, 0))
    first = next(each for each in launches if "grid" in each)
    assert first["grid"] == (288, 3, 2)
    listed = list(memoryview(mx.as_strided(first["inputs"][-1], (24,), (1,))))
    assert [tuple(listed[at : at + 3]) for at in range(0, 24, 4)] == [
        *((0, 0, 0), (0, 1, 0), (1, 0, 9), (1, 1, 9), (2, 0, 0), (2, 1, 0))
    ]


@pytest.mark.parametrize("scale", [3.4e38, -3.4e38, 1e-45, 0.0])
def test_any_scale_that_float32_holds_is_passed(
    launches: list[dict[str, Any]], scale: float
) -> None:
    case = make_case(SHAPE)
    mla_decode(case.q_nope, case.q_pe, case.cache, scale=scale, plan=Plan("single", 1, DEFAULT))
    assert [each for each in launches if "grid" in each]


@pytest.mark.parametrize(
    ("layout", "geometry", "inputs"),
    [
        ("paged", 0, ["q_nope", "q_pe", "latent", "block_table", "info"]),
        ("paged", 1, ["q_nope", "latent", "block_table", "info"]),
        ("dense", 0, ["q_nope", "q_pe", "latent", "k_pe", "info"]),
        ("dense", 1, ["q_nope", "latent", "info"]),
    ],
)
def test_only_what_a_kernel_reads_is_passed(
    launches: list[dict[str, Any]], layout: str, geometry: int, inputs: list[str]
) -> None:
    shape = Shape(300, 1, 16, geometry=GEOMETRIES[geometry], layout=layout)
    decode(shape, Plan("single", 1, DEFAULT))
    made, launch = launches
    assert list(made["input_names"]) == inputs
    assert len(launch["inputs"]) == len(inputs)
    assert all(isinstance(each, mx.array) for each in launch["inputs"])


def test_what_ran_is_told(launches: list[dict[str, Any]]) -> None:
    decode(SHAPE, Plan("split", 60, "r64w"))
    run = ops.last_run()
    assert run is not None
    assert run.executed == Plan("split", 5, "r64w")
    assert run.detail == {
        "kernel": "wide",
        "threads": 384,
        "blocks": 5,
        "pieces": 5,
        "piece_tokens": 64,
        "launches": 2,
    }
