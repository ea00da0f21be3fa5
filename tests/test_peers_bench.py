"""The harness of the CUDA kernels: other libraries, times, tables and the command; no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import mlx.core as mx
import pytest

from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools.nvrtc import Kernel
from tools.peers import bench, choices, gpu, graphs, ours, recording, tables, theirs, unpack
from tools.peers.graphs import Time
from tools.peers.tables import Row

SHAPE = Shape(8192, 1, 16)
GPU = bench.Gpu("GPU", 90, 132, 50 << 20)


# --- the other libraries ---------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.whl"
    with ZipFile(path, "w") as archive:
        for name in (*unpack.FILES, "vllm/other.py"):
            archive.writestr(name, f"# {name}\n")
    return path


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_is_unpacked_to_a_folder(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unpack.main([str(wheel), str(tmp_path / "out")]) == 0
    assert files_in(tmp_path / "out") == set(unpack.FILES)
    assert capsys.readouterr().out == f"5 files are in {tmp_path / 'out'}\n"


def test_a_wheel_is_packed_in_a_small_zip_that_can_be_opened(wheel: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.zip"
    assert unpack.main([str(wheel), str(small)]) == 0
    with unpack.opened(small) as folder:
        assert files_in(folder) == set(unpack.FILES)
        assert (folder / unpack.FA3).read_text() == f"# {unpack.FA3}\n"
        with unpack.opened(folder) as same:
            assert same == folder
    assert not folder.exists()


def test_what_a_wheel_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ZipFile(tmp_path / "vllm.whl", "w") as archive:
        archive.writestr(unpack.TRITON, "")
    assert unpack.main([str(tmp_path / "vllm.whl"), str(tmp_path / "out")]) == 1
    assert unpack.FA3_LIBRARY in capsys.readouterr().err


def test_what_is_no_wheel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.whl").write_text("text")
    for name in ("text.whl", "absent.whl"):
        assert unpack.main([str(tmp_path / name), str(tmp_path / "out")]) == 1
        assert f"{name} can't be unpacked" in capsys.readouterr().err
    assert unpack.main([]) == 2
    assert "pip download" in capsys.readouterr().err


@pytest.fixture
def own_modules() -> Iterator[None]:
    """What is put in `sys.modules` goes away again."""
    with patch.dict(sys.modules):
        yield


@pytest.mark.usefixtures("own_modules")
def test_libraries_that_are_missing_are_named(tmp_path: Path) -> None:
    makers, reasons = theirs.load(tmp_path)
    assert makers == {}
    assert [reason.split(" is left out: ")[0] for reason in reasons] == [
        "FA3-MLA",
        "FlashMLA",
        "Triton",
    ]


@pytest.mark.usefixtures("own_modules")
def test_libraries_are_loaded_over_stand_ins_for_vllm(tmp_path: Path) -> None:
    loaded: list[str] = []
    torch = ModuleType("torch")
    torch.ops = SimpleNamespace(load_library=loaded.append)  # type: ignore[attr-defined]
    triton = ModuleType("triton")
    sys.modules |= {"torch": torch, "triton": triton, "triton.language": triton}
    for name, text in (
        (unpack.FA3_LIBRARY, ""),
        (unpack.FLASH_MLA_LIBRARY, ""),
        (unpack.FA3, "from . import _vllm_fa3_C\n"),
        (unpack.FLASH_MLA, "import vllm._flashmla_C\n"),
        (
            unpack.TRITON,
            "from vllm.platforms import current_platform\n"
            "from vllm.triton_utils import tl, triton\n"
            "assert not current_platform.is_rocm()\n",
        ),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    makers, reasons = theirs.load(tmp_path)
    assert reasons == []
    assert list(makers) == ["FA3-MLA", "FA3-MLA unplanned", "FlashMLA", "Triton"]
    assert [Path(path).name for path in loaded] == ["_vllm_fa3_C.abi3.so", "_flashmla_C.abi3.so"]


@pytest.mark.parametrize(
    ("context", "splits"), [(100, 1), (1024, 2), (8192, 16), (40000, 128), (1 << 20, 264)]
)
def test_triton_splits_as_vllm_has_it(context: int, splits: int) -> None:
    assert theirs.triton_splits(context, 132) == splits


# --- times -----------------------------------------------------------------------------------


class FakeGraph:
    """In place of a captured graph: `us` gives the times it was made with, then the last one."""

    def __init__(self, *times: float) -> None:
        self.times, self.last = list(times), SimpleNamespace(fill_=lambda value: None)

    def us(self, *how: float) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]

    def replay(self) -> None:
        pass


def test_rounds_are_interleaved_and_summed_up() -> None:
    found = graphs.interleaved({"a": FakeGraph(3.0, 1.0, 2.0), "b": FakeGraph(5.0)}, rounds=3)  # type: ignore[dict-item]
    assert found == {"a": Time(2.0, 1.0, 3.0, 3), "b": Time(5.0, 5.0, 5.0, 3)}


class Lab:
    """A bench whose GPU is a table: microseconds and error by plan or library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, us: dict[str, float]) -> None:
        self.us, self.errors, self.now = us, dict.fromkeys(us, 1e-3), ""
        self.caches = SimpleNamespace(shape=SHAPE, count=19, error=lambda last: self.errors[last])
        kernels = SimpleNamespace(failure=lambda each: "bad text" if self.us_of(each) < 0 else None)
        monkeypatch.setattr(bench, "Caches", lambda shape, count: self.caches)
        monkeypatch.setattr(bench, "Bound", self.bound)
        monkeypatch.setattr(bench, "Graph", self.graph)
        monkeypatch.setattr(bench, "import_module", lambda name: self)
        self.cuda = SimpleNamespace(synchronize=lambda: None)
        makers: Any = {"FlashMLA": lambda caches: self.peer}
        self.bench = bench.Bench(GPU, kernels, makers, rounds=3, caches=19)  # type: ignore[arg-type]
        self.row = Row("shape")

    def us_of(self, each: ours.Planned) -> float:
        return self.us[choices.short(each.plan)]

    def bound(self, each: ours.Planned, kernels: object, caches: object) -> SimpleNamespace:
        name = choices.short(each.plan)
        if self.us[name] == 0:
            raise ValueError("no such kernel")
        merges = each.plan.partitions > 1
        parts = {part: SimpleNamespace(name=f"{name} {part}") for part in ("decode", "merge")}
        call = SimpleNamespace(name=name)
        return SimpleNamespace(work=each, merges=merges, call=call, spoil=list, **parts)

    @property
    def peer(self) -> SimpleNamespace:
        if self.us["FlashMLA"] == 0:
            raise RuntimeError("not for such a call")
        return SimpleNamespace(name="FlashMLA")

    def graph(self, call: SimpleNamespace, count: int) -> FakeGraph:
        made = FakeGraph(self.us.get(call.name, 1.0))
        made.last = LastAnswer(call.name)  # type: ignore[assignment]
        return made

    def fill(self, *plans: Plan) -> Row:
        self.bench.fill(self.row, SHAPE, [work(plan) for plan in plans])
        return self.row


def work(plan: Plan) -> ours.Planned:
    kernel = Kernel("f", "text", (1, 1, 1), (1, 1, 1), 0, ())
    return ours.Planned(ours.Variant(), plan, (recording.Launch(kernel, (), {}, ()),))


class LastAnswer(str):
    """What a graph's last call answered, by name."""

    def fill_(self, value: float) -> None:
        pass


PLANS = (Plan("single", 1, "r16"), Plan("split", 2, "r16"), Plan("split", 4, "r16"))


def test_the_best_plan_runs_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"r16:1": 9.0, "r16:2": 4.0, "r16:4": 5.0, "FlashMLA": 6.0}
    row = Lab(monkeypatch, times).fill(*PLANS)
    assert row.plans == {"ours": "r16:2"}
    assert row.trials == {"ours": {"r16:1": 9.0, "r16:2": 4.0, "r16:4": 5.0}}
    assert set(row.times) == {"ours", "ours decode", "ours merge", "FlashMLA"}
    assert row.times["ours"].us == 4.0
    assert row.faults == []


def test_a_plan_of_one_launch_has_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Lab(monkeypatch, {"r16:1": 3.0, "FlashMLA": 6.0}).fill(PLANS[0])
    assert set(row.times) == {"ours", "ours decode", "FlashMLA"}


@pytest.mark.parametrize("error", [3e-3, float("nan")])
def test_a_wrong_plan_is_never_the_best(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    lab = Lab(monkeypatch, {"r16:1": 9.0, "r16:2": 4.0, "FlashMLA": 6.0})
    lab.errors["r16:2"] = error
    row = lab.fill(*PLANS[:2])
    assert row.plans == {"ours": "r16:1"}
    assert [fault.split(":")[0:2] for fault in row.faults] == [["ours r16", "2 is WRONG"]]


def test_a_wrong_library_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, {"r16:1": 9.0, "FlashMLA": 6.0})
    lab.errors["FlashMLA"] = 0.5
    row = lab.fill(PLANS[0])
    assert "FlashMLA" not in row.times
    assert "FlashMLA is WRONG" in row.faults[0]


def test_what_cannot_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(monkeypatch, {"r16:1": -1.0, "r16:2": 0.0, "r16:4": 5.0, "FlashMLA": 0.0})
    row = lab.fill(*PLANS)
    assert row.faults == [
        "ours r16:1 does not compile: bad text",
        "ours r16:2 failed: ValueError: no such kernel",
    ]
    assert row.plans == {"ours": "r16:4"}
    said = capsys.readouterr().err
    assert "shape FlashMLA failed: RuntimeError: not for such a call" in said


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, {"r16:1": 0.0, "FlashMLA": 6.0})

    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    lab.cuda.synchronize = lost
    with pytest.raises(bench.GpuLostError, match="ours r16:1 failed"):
        lab.fill(PLANS[0])


def test_a_kernel_that_hangs_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(bench, "HANGS_S", 0.0)
    monkeypatch.setattr(bench.os, "_exit", ended.append)
    with bench.watched("a kernel"):
        while not ended:
            pass
    assert ended == [1]
    assert capsys.readouterr().err == "a kernel hangs; giving up\n"


# --- what is printed -------------------------------------------------------------------------


def row_of(**times: float) -> Row:
    named = {name.replace("_", " "): Time(us, us * 0.9, us * 1.05, 3) for name, us in times.items()}
    return Row("1 x 16 x 8192", 27, named, plans={"ours": "r16:64"})


def test_the_table_has_times_then_ratios() -> None:
    row = row_of(ours=10.0, ours_decode=8.0, ours_merge=3.0, FlashMLA=30.0)
    row.times |= {"FA3-MLA": Time(20.0, 20.0, 20.0, 3), "FA3-MLA unplanned": Time(19.0, 19, 19, 3)}
    assert tables.table([row], ["ours"]).splitlines() == [
        "| batch x heads x context | FA3-MLA | FlashMLA | ours | plan | decode | merge "
        "| FA3-MLA/ours | FlashMLA/ours | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 1 x 16 x 8192 | 19.0 | 30.0 | 10.0 | r16:64 | 8.0 | 3.0 | 1.90 | 3.00 | 10.0% |",
    ]


def test_what_is_missing_is_a_dash_and_variants_have_columns() -> None:
    row = row_of(new=5.0, new_decode=5.0)
    row.plans["new"] = "r8:1"
    *_, line = tables.table([row], ["ours", "new"]).splitlines()
    assert line == "| 1 x 16 x 8192 | - | r16:64 | - | - | 5.0 | r8:1 | 5.0 | - | - | 10.0% |"


def test_the_spread_is_the_farthest_round() -> None:
    assert row_of(ours=10.0).spread == pytest.approx(0.1)
    assert Row("none").spread == 0.0


def test_a_line_tells_times_and_errors() -> None:
    row = row_of(ours=10.0, FlashMLA=30.0, ours_decode=8.0)
    row.errors = {"ours r16:64": 1.7e-3, "FlashMLA": 1.65e-3}
    assert tables.times_line(row) == (
        "ours 10.00 (9.00..10.50, error 1.7e-03) FlashMLA 30.00 (27.00..31.50, error 1.6e-03) "
        "ours decode 8.00 (7.20..8.40)"
    )


def test_a_sweep_is_a_line_a_tile_and_the_best() -> None:
    row = Row("1 x 16 x 9", trials={"ours": {"r16:2": 4.04, "r16:4": 5.0, "r8:2": 3.0}, "new": {}})
    assert tables.trial_lines(row) == [
        "1 x 16 x 9 ours r16  2:4.0 4:5.0",
        "1 x 16 x 9 ours r8  2:3.0",
        "1 x 16 x 9 ours best r8:2 3.0 us",
    ]


def test_the_file_has_all_and_with_what_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi there
    gpu.report([row_of(ours=10.0)], [ours.Variant()], GPU, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["gpu"]["name"] == "GPU"
    assert written["software"]["driver"] == "unknown"
    assert written["software"]["mlx"] == mx.__version__
    assert written["rows"][0]["times"]["ours"] == {
        "us": 10.0,
        "low": 9.0,
        "high": 10.5,
        "rounds": 3,
    }
    assert capsys.readouterr().out.startswith("| batch x heads")


# --- the command -----------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, here: bench.Gpu | None = GPU) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setattr(gpu, "gpu_here", lambda: here)
    try:
        return gpu.main()
    except SystemExit as left:
        return int(left.code or 0)


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--no-peers", here=None) == 1
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--vllm says where"),
        (("--no-peers", "--shapes", "16"), "BATCHxHEADSxCONTEXT"),
        (("--no-peers", "--plans", "r64w"), "TILE:PARTITIONS"),
        (("--no-peers", "--variant", "x"), "NAME=FOLDER"),
        (("--vllm", "/nowhere"), "--vllm /nowhere"),
        (("--no-peers", "--lengths", "x"), "expected lengths"),
    ],
)
def test_usage_errors(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_help_says_how_to_get_the_wheel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "pip download" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["", "wrong", "lost"])
def test_the_exit_code_tells_of_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    def fill(self: bench.Bench, row: Row, shape: Shape, plans: list[ours.Planned]) -> None:
        row.plans["ours"] = choices.short(plans[0].plan)
        if fault == "lost":
            raise bench.GpuLostError("gone")
        row.faults += [fault] * bool(fault)

    torch: Any = SimpleNamespace(
        OutOfMemoryError=MemoryError, cuda=SimpleNamespace(empty_cache=list)
    )
    monkeypatch.setattr(gpu, "import_module", lambda name: torch)
    monkeypatch.setattr(bench.Bench, "fill", fill)
    monkeypatch.setattr(ours.Kernels, "compile", lambda self, work: None)
    code = run(monkeypatch, "--no-peers", "--shapes", "1x16x8192", "--plans", "r16:64")
    assert code == (1 if fault else 0)
    assert "| 1 x 16 x 8192 | - | r16:64 |" in capsys.readouterr().out
