"""The repository's tools run: peaks, benchmarks, the PyTorch peer, the macOS check."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest

from mla_tuner.errors import BudgetError
from mla_tuner.ops import last_run
from mla_tuner.plan import Plan
from tools import bench_cpu, serving_cost
from tools.cpu_bench import process
from tools.cpu_bench import rounds as rounds_module
from tools.cpu_bench.results import Figure, Results, as_json, markdown
from tools.cpu_bench.rounds import Form, Probe, Rounds, interleave
from tools.cpu_bench.sections import Options
from tools.macos import check
from tools.macos.macho import imports
from tools.peaks import peaks
from tools.peers import torch_cpu

ROOT = Path(__file__).parents[1]


# --- peaks ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
def test_every_instruction_set_gives_a_plausible_peak() -> None:
    assert set(peaks.isas()) <= {"avx512", "avx2", "neon", "generic"}
    for isa in peaks.isas():
        assert 0.1 < peaks.fma_gflops(1, isa, ms=0.5) < 1e4
    assert 0.1 < peaks.fma_gflops(2, ms=0.5) < 1e4


@pytest.mark.usefixtures("compiler")
def test_reading_a_buffer_gives_a_plausible_bandwidth() -> None:
    with peaks.Reader(1 << 20) as reader:
        for threads in (1, 2, 3):
            assert 0.01 < reader.gb_per_s(threads, passes=3) < 1e4


@pytest.mark.usefixtures("compiler")
def test_an_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="got 'mmx'"):
        peaks.fma_gflops(1, "mmx", ms=0.1)


# --- benchmark -----------------------------------------------------------------------------------


def fixed(name: str, kind: str, *seconds: float) -> Form:
    values = iter(seconds + (seconds[-1],) * 1000)
    return Form(name, kind, lambda: next(values))


def test_rounds_pair_their_ratios_and_drop_the_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Probe((100.0, 100.0), (100.0, 100.0))  # a real one depends on who else is computing
    monkeypatch.setattr(rounds_module, "_probe", lambda threads: free)
    forms = [
        fixed("ours", "own", 1, 2, 4),
        fixed("slow", "own", 9),
        fixed("peer", "peer", 2, 4, 8),
    ]
    rounds = interleave(forms, threads=1, seconds=0.0)
    assert rounds.ratio("peer", "ours") == 2
    assert rounds.best("own") == "ours"
    assert rounds.min("ours") == 1
    assert len(rounds.seconds["ours"]) == rounds.count == 5
    assert rounds.seconds["slow"][-1] != rounds.seconds["slow"][-1]  # NaN: it left


def test_rounds_with_a_taken_core_do_not_count() -> None:
    free, taken = Probe((100.0, 99.0), (199.0, 198.0)), Probe((100.0, 99.0), (199.0, 101.0))
    slow = Probe((100.0, 60.0), (199.0, 198.0))
    seconds = {"ours": [1.0, 9.0, 1.0, 1.0, 9.0]}
    rounds = Rounds(2, seconds, {"ours": "own"}, [free, free, taken, free, free, slow])
    assert rounds.free == [0, 3]
    assert rounds.taken  # two are too few
    assert Figure("s", "w", "h", 2, 1.0, "x", 2.0).of(rounds, "ours").verdict.startswith("not")
    seconds["ours"].append(9.0)
    rounds.probes[5:] = [free, slow]
    assert rounds.median("ours") == 1.0
    assert not rounds.taken


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [
        (2.0, True, "pass"),
        (1.9, True, "FALLS SHORT"),
        (2.0, False, "pass"),
        (2.1, False, "FALLS SHORT"),
    ],
)
def test_a_figure_is_held_to_its_target(value: float, at_least: bool, verdict: str) -> None:
    assert Figure("s", "w", "h", 1, value, "x", 2.0, at_least).verdict == verdict


def run_section(name: str, **options: object) -> Results:
    found = bench_cpu.run([name], Options(seconds=0.0, shrink=1024, **options))  # type: ignore[arg-type]
    for figure in found.figures:
        assert math.isfinite(figure.value), figure
    assert json.dumps(as_json({}, found))
    for figure in found.figures:
        assert figure.what in markdown({"machine": "this"}, found)
    return found


def test_the_benchmark_starts_anew_for_other_pages_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda *_: started.append(os.environ["GLIBC_TUNABLES"]))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    process.use_pages("huge")
    process.use_pages("huge")
    assert started == ["glibc.malloc.check=1:glibc.malloc.hugetlb=1"]
    process.use_pages("small")
    assert started[1:] == ["glibc.malloc.check=1"]


def test_the_policy_section_runs() -> None:
    found = run_section("policy")
    verdicts = {figure.what: figure.verdict for figure in found.figures}
    assert verdicts["files opened by policy.decide"] == "pass"
    assert verdicts["foreign modules loaded by import and decide"] == "pass"


@pytest.mark.usefixtures("kernel")
class TestWithKernel:
    def test_a_form_is_timed_only_if_its_plan_ran(self) -> None:
        found = run_section("split", threads=(1,))
        assert {form.form.split()[0] for form in found.forms} == {"single", "split"}
        assert all(form.error is not None and form.error < 2.5e-3 for form in found.forms)

    def test_mlx_is_timed_beside_ours(self) -> None:
        found = run_section("mlx", threads=(1,))
        assert {"mlx", "mlx_rows"} <= {form.form for form in found.forms}

    def test_memory_beyond_the_inputs_is_found(self) -> None:
        found = run_section("linear", threads=(1,))
        assert any("MLX's peak" in figure.what and figure.value > 0 for figure in found.figures)


def test_an_unknown_section_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_cpu.main(["--section", "peek"])
    assert stopped.value.code == 2
    assert "peek" in capsys.readouterr().err


# --- peers ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch_cpu.available(), reason="torch is installed")
def test_the_peer_says_in_one_line_that_torch_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.peers.torch_cpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip() == torch_cpu.MISSING


@pytest.mark.skipif(not torch_cpu.available(), reason="torch is not installed (extra: peers)")
@pytest.mark.usefixtures("kernel")
def test_torch_is_timed_beside_ours() -> None:
    found = run_section("torch", threads=(1,))
    assert any(form.form == "torch sdpa" for form in found.forms)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec("mlx_lm"), reason="mlx-lm is not installed (extra: test)")
class TestServingCost:
    def test_one_look_up_a_step_and_a_time_for_each_cost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving_cost, "CALLS", 2)
        found = serving_cost.cost()
        assert found.pop("look-ups a step") == 1
        assert len(found) == 7
        assert all(math.isfinite(us) for us in found.values())
        assert found["routing a call"] > 0

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--context", "10"),
            ("--context", "2m"),
            ("--rounds", "0"),
            ("--tokens", "-1"),
            ("--hidden", "0"),
            ("--budget", "0"),
        ],
    )
    def test_numbers_that_mean_nothing_are_usage_errors(
        self, option: str, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            serving_cost.main([f"{option}={value}"])
        assert ended.value.code == 2
        assert f"argument {option}: invalid" in capsys.readouterr().err

    def test_what_fails_is_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def too_small(*args: object) -> None:
            raise BudgetError("too small a budget")

        monkeypatch.setattr(serving_cost, "cost", dict)
        for speed, text in ((too_small, "too small a budget"), (dict, "No such file")):
            monkeypatch.setattr(serving_cost, "speed", lambda *args, made=speed: made())
            with pytest.raises(SystemExit) as ended:
                serving_cost.main(["--json", str(tmp_path / "no" / "x.json")])
            assert ended.value.code == 1
            error = capsys.readouterr().err
            assert error.startswith("Error: ")
            assert text in error
            assert error.count("\n") == 1

    @pytest.mark.usefixtures("kernel")
    def test_a_model_is_timed_with_its_plan_and_without(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = serving_cost.OnePlan(Plan("split", 2))
        monkeypatch.setattr(serving_cost, "tuned_policy", lambda shape, budget_s: policy)
        found = serving_cost.speed(300, hidden=32, rounds=2, count=2, budget_s=1)
        assert found["plan"] == "split x2"
        assert len(found["ratios"]) == 2
        assert found["stock tokens/s"] > 0
        assert found["by the function tokens/s"] > 0
        mx.synchronize(import_module("mlx_lm.generate").generation_stream)
        ran = last_run()
        assert ran is not None
        assert ran.executed is not None
        assert (ran.executed.path, ran.executed.partitions) == ("split", 2)


# --- macOS check ---------------------------------------------------------------------------------


def test_the_macos_check_takes_what_cmake_takes() -> None:
    taken = {path.name for path in check.sources(ROOT / "csrc")}
    named = (ROOT / "CMakeLists.txt").read_text()
    assert "kernel_neon.cpp" in taken
    assert taken == set(re.findall(r"csrc/(\w+\.cpp)", named))
    assert "-ffp-contract=fast" in check.kernel_flags()


def test_the_macos_check_uses_the_pinned_releases() -> None:
    assert check.pinned("mlx").count(".") == 2
    assert check.pinned("nanobind").count(".") == 2


def test_imports_of_a_macho_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "made.dylib"
    path.write_bytes(macho_file("/usr/lib/libthing.dylib", {"_found": 1, "_lost": 0xFE}))
    assert {i.symbol: i.library for i in imports(path)} == {
        "_found": "/usr/lib/libthing.dylib",
        "_lost": "",
    }


def test_an_elf_file_is_no_macho_file(tmp_path: Path) -> None:
    path = tmp_path / "elf.so"
    path.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(ValueError, match="not a thin arm64 Mach-O"):
        imports(path)


def macho_file(library: str, undefined: dict[str, int]) -> bytes:
    """A Mach-O file with one library and undefined symbols, each with its library's ordinal."""
    name = library.encode() + b"\0"
    load = struct.pack("<6I", 0xC, 24 + len(name), 24, 0, 0, 0) + name
    table_at = 32 + len(load) + 24
    symbols, strings = b"", b"\0"
    for symbol, ordinal in undefined.items():
        symbols += struct.pack("<IBBHQ", len(strings), 0x01, 0, ordinal << 8, 0)
        strings += symbol.encode() + b"\0"
    table = struct.pack(
        "<6I", 0x2, 24, table_at, len(undefined), table_at + len(symbols), len(strings)
    )
    head = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 2, len(load) + 24, 0, 0)
    return head + load + table + symbols + strings
