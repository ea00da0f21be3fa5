"""The regret of a table on shapes off its grid: on a simulated device, with known answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeBackend, FakeRunner, FakeRunners, make_device

from mla_tuner import backends
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, Decision, Plan
from mla_tuner.shapes import MAX_HEADS, Shape
from tools import cuda_regret
from tools.cuda_regret import Result, WrongError

SHAPE = Shape(3072, 1, 16)
BEST = Plan("split", 24, "r16")
TUNED = Decision(Plan("split", 12, "r16"), "tuned", "")


def seconds(plan: Plan) -> float:
    """The more partitions the better, up to 24; `mlx` is far behind, `mlx_rows` half as fast."""
    if not plan.native:
        return 1e-2 if plan == MLX else 2e-3
    return 1e-3 * (1 + abs(plan.partitions - 24) / 24) * (1 + 0.1 * (plan.tile == "r32"))


def result(decision: Decision, **options: object) -> Result:
    runner = FakeRunner(seconds, 1e-3, queued=True, **options)  # type: ignore[arg-type]
    return cuda_regret.result(SHAPE, decision, FakeBackend(), runner, 1e4)


def test_regret_is_against_the_best_of_all() -> None:
    found = result(TUNED)
    assert (found.source, found.decided, found.best) == ("tuned", str(TUNED.plan), str(BEST))
    assert found.regret == pytest.approx(0.5, abs=0.01)
    assert found.mlx_us == pytest.approx(2000, rel=0.01)
    assert not found.slower
    counts = 1 + 31  # 3072 tokens make 2 to 24 pieces and a few more counts
    assert found.plans <= 2 + 2 * counts


def test_the_best_has_no_regret() -> None:
    found = result(replace(TUNED, plan=BEST))
    assert found.regret == 0
    assert found.decided == found.best


def test_a_decision_may_ask_for_more_pieces_than_there_are_and_for_no_tile() -> None:
    found = result(replace(TUNED, plan=Plan("split", 200)))
    assert found.decided == "split x48 r16"


def test_slower_than_the_better_path_of_mlx_is_said() -> None:
    found = result(Decision(MLX, "gates", ""))
    assert found.slower
    assert found.regret == pytest.approx(9, abs=0.2)
    rows = result(Decision(Plan("mlx_rows"), "tuned", ""))
    assert not rows.slower


def wrong(plan: Plan) -> Callable[[Plan], Checked]:
    return lambda each: Checked(each != plan, 0.5, "row error 0.5", 1e-4)


def test_a_wrong_plan_is_left_out_and_named() -> None:
    found = result(TUNED, check_result=wrong(BEST))
    assert found.best != str(BEST)
    assert found.wrong == (f"{BEST}: row error 0.5",)
    assert f"Left out, {found.shape} {BEST}: row error 0.5." in cuda_regret.report([found], "")


def test_a_wrong_decision_ends_it() -> None:
    with pytest.raises(WrongError, match=r"3K b1 h16 bf16 split x12 r16: row error 0\.5"):
        result(TUNED, check_result=wrong(TUNED.plan))


def test_mlx_may_be_out_of_memory_but_not_in_both_paths() -> None:
    def check(plan: Plan) -> Checked:
        if plan == MLX:
            raise MemoryError("no room")
        return Checked(True, 0.0, "", 1e-4)

    assert result(TUNED, check_result=check).mlx_us == pytest.approx(2000, rel=0.01)

    def neither(plan: Plan) -> Checked:
        return check(plan if plan.native else MLX)

    with pytest.raises(WrongError, match="MLX was not timed"):
        result(TUNED, check_result=neither)


def test_a_sweep_that_the_budget_cut_is_none() -> None:
    runner = FakeRunner(seconds, queued=True)
    with pytest.raises(WrongError, match="give a longer --budget"):
        cuda_regret.result(SHAPE, TUNED, FakeBackend(), runner, 1e-3)


def test_kernels_are_compiled_before_the_clock_runs() -> None:
    assert cuda_regret.compile_all([SHAPE], FakeBackend()) >= 0
    with pytest.raises(WrongError, match="no right answer"):
        cuda_regret.compile_all([SHAPE], FakeBackend(checked=(False, "no right answer")))


# --- the verdict ---------------------------------------------------------------------------------


def row(source: str, regret: float, slower: bool = False) -> Result:
    times = (10.0 * (1 + regret), 10.0, 90.0)
    return Result("3K", source, "single r8", "split x2 r8", *times, regret, slower, 100, 1.0)


def test_the_mean_is_that_of_the_table() -> None:
    average, problems = cuda_regret.verdict(
        [row("tuned", 0.01), row("fitted", 0.02), row("gates", 9)]
    )
    assert average == pytest.approx(0.015)
    assert problems == []
    assert cuda_regret.verdict([row("gates", 0.0)])[1] == ["no decision comes from the table"]
    assert cuda_regret.verdict([row("tuned", 0.03)])[1] == ["the mean regret is 3.0%, more than 2%"]
    assert cuda_regret.verdict([row("tuned", 0.0), row("gates", 1.0, True)])[1] == [
        "3K: single r8 is slower than MLX"
    ]


def test_the_answer_is_a_table() -> None:
    lines = list(cuda_regret.report([row("tuned", 0.015)], "GPU time"))
    assert "| 3K | tuned | single r8 | split x2 r8 | 10.1 | 10.0 | 90.0 | 1.5% |" in lines
    assert lines[-2:] == [
        "Mean regret of 1 decisions from the table: 1.50%.",
        "None is slower than MLX's better path.",
    ]


def test_shapes_are_off_the_grid() -> None:
    assert len(cuda_regret.SHAPES) >= 12
    for shape in cuda_regret.SHAPES:
        assert shape.context & (shape.context - 1) != 0
        assert shape.heads <= MAX_HEADS
    assert {shape.batch for shape in cuda_regret.SHAPES} >= {1, 3, 6, 12, 24}
    assert {shape.dtype for shape in cuda_regret.SHAPES} == {"bfloat16", "float16"}


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunners:
    runners = FakeRunners(
        lambda shape, plan: seconds(plan) * shape.context / 3072, 1e-3, {"queued": True}
    )
    runners.clock = object()  # type: ignore[attr-defined]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of this test alone
    monkeypatch.setattr(cuda_regret, "LiveRunners", lambda device: runners)
    monkeypatch.setattr(cuda_regret.device, "probe", lambda name: make_device(132, name))
    monkeypatch.setattr(cuda_regret.device, "use", lambda device: None)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(name=name))
    return runners


def test_without_a_table_the_command_fails(
    machine: FakeRunners, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--db", str(tmp_path / "none.db"), "--only", "3K b1", "--json", str(tmp_path / "r")]
    assert cuda_regret.main(args) == 1
    printed = capsys.readouterr().out
    assert "GPU time with the queue full" in printed
    assert "no decision comes from the table" in printed
    found = json.loads((tmp_path / "r").read_text())
    assert found["device"] == "cuda/x86_64-avx2/132c/24gb"
    assert [row["source"] for row in found["results"]] == ["gates"]


def test_an_unknown_shape_is_a_usage_error(machine: FakeRunners) -> None:
    with pytest.raises(SystemExit) as error:
        cuda_regret.main(["--db", "x", "--only", "7K"])
    assert error.value.code == 2


def test_without_kernels_there_is_nothing_to_compare(
    machine: FakeRunners, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend("no GPU"))
    assert cuda_regret.main(["--db", "x"]) == 1
    assert "the kernels can't run: no GPU" in capsys.readouterr().out
