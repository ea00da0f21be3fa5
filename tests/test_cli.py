"""The command line: what is parsed, printed and exited with, on a simulated device."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GRID, TUNE, answer, error, run
from fakes import FakeBackend, FakeRunners, make_device

from mla_tuner import __version__, backends
from mla_tuner import device as devices
from mla_tuner.measure import machine_lock
from mla_tuner.plan import MLX, Plan
from mla_tuner.store import Store


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where MLA_TUNER_DB points in every test."""
    return tmp_path / "tuning.db"


# --- tune --------------------------------------------------------------------------------------


def test_tune_resume_and_plan(fake: FakeRunners, db: Path) -> None:
    first = run(*TUNE)
    assert "2 buckets, 1 h." in first.stderr
    assert "1/2  1K b1 h16 bf16: split x" in first.stderr
    assert "2 buckets tuned" in first.stdout
    assert str(db) in first.stdout.replace("\n", "")
    made = len(fake.made)
    again = run(*TUNE)
    assert "2 of 2 are tuned already (20" in again.stderr
    assert "0 buckets tuned" in again.stdout
    assert len(fake.made) == made  # nothing was measured
    decision = answer("plan", "--context", "4096", "--heads", "16")
    assert decision["source"] == "tuned"
    assert decision["path"] == "split"
    assert decision["speedup"] >= decision["speedup_low"] > 1
    text = run("plan", "--context", "4k", "--heads", "16").stdout
    assert "tuned on this device" in text


def test_plan_explains_each_step(fake: FakeRunners) -> None:
    run(*TUNE)
    shape = ("plan", "--context", "2k", "--heads", "16")
    found = answer(*shape, "--explain")
    assert "steps" not in answer(*shape)
    (answered,) = [step for step in found["steps"] if step["answered"]]
    assert (answered["step"], answered["reason"]) == (found["source"], found["reason"])
    assert answered["step"] == "fitted"
    assert "at 1024 (" in answered["details"][0]
    text = run(*shape, "--explain").stdout
    assert "fitted  answers: between tuned contexts 1024" in text
    assert "- native wins from 1024" in text


def test_tune_json(fake: FakeRunners, db: Path) -> None:
    found = answer(*TUNE)
    assert list(found) == [
        *("device", "db", "seconds", "tuned", "already_tuned", "dropped_rounds", "paused_s"),
        *("compiled", "plans", "not_reached", "failed", "continue"),
    ]
    assert (found["db"], found["tuned"], found["continue"]) == (str(db), 2, None)
    row = found["plans"][0]
    assert (row["bucket"], row["context"], row["new"]) == ("1K b1 h16 bf16", 1024, True)
    again = answer(*TUNE)
    assert (again["tuned"], again["already_tuned"]) == (0, 2)
    assert [each["new"] for each in again["plans"]] == [False, False]


def test_what_the_budget_left_is_said_with_the_command_that_continues(fake: FakeRunners) -> None:
    args = ("--budget", "5s", "--contexts", "1k,32k", "--batches", "1,8", "--heads", "128")
    fake.seconds = lambda shape, plan: shape.flop * 1e-11 * (1 if plan == MLX else 0.1)
    found = answer(*args)
    assert found["tuned"] >= 1
    assert {row["bucket"] for row in found["not_reached"]} >= {"32K b8 h128 bf16"}
    assert found["continue"] == "mla-tune " + " ".join((*args, "--json"))
    assert "not reached:" in run(*args).stdout


def test_a_budget_too_small_for_one_bucket(fake: FakeRunners) -> None:
    fake.seconds = lambda shape, plan: 10.0
    assert "too small for a single bucket" in error("--budget", "1s", *GRID)


def test_ctrl_c_keeps_finished_buckets(fake: FakeRunners) -> None:
    def interrupt(plan: Plan) -> Plan:
        if fake.made[-1].context == 4096:
            raise KeyboardInterrupt
        return plan

    fake.options["executed"] = interrupt
    line = error(*TUNE)
    assert line.startswith(
        "interrupted; finished buckets are stored. To continue: mla-tune --budget"
    )
    assert answer("plan", "--context", "1k", "--heads", "16")["source"] == "tuned"
    fake.options.clear()
    assert answer(*TUNE)["already_tuned"] == 1


def test_another_tuner_is_running(fake: FakeRunners) -> None:
    with machine_lock():
        for command in (TUNE, ["bench", *GRID]):
            assert "another process is tuning" in error(*command)
            assert len(run(*command, code=1).stderr.splitlines()) == 1


def test_model_gives_heads_and_geometry(fake: FakeRunners, tmp_path: Path) -> None:
    args = ("--budget", "1h", "--contexts", "1k", "--batches", "1")
    (row,) = answer(*args, "--model", "minicpm3")["plans"]
    assert (row["heads"], row["kv_lora_rank"], row["rope_dim"]) == (40, 256, 32)
    (row,) = answer(*args, "--model", "minicpm3", "--heads", "20")["plans"]
    assert (row["heads"], row["kv_lora_rank"]) == (20, 256)
    config = tmp_path / "config.json"
    config.write_text('{"num_attention_heads": 7, "kv_lora_rank": 512, "qk_rope_head_dim": 64}')
    (row,) = answer(*args, "--model", str(config))["plans"]
    assert (row["heads"], row["kv_lora_rank"]) == (7, 512)


def test_every_list_is_tuned(fake: FakeRunners) -> None:
    lists = ["--dtypes", "bf16,fp32", "--q-lens", "1,2", "--layouts", "paged,dense"]
    rows = answer("--budget", "1h", *GRID, *lists, "--geometry", "256+64")["plans"]
    assert len(rows) == 16
    assert {(row["dtype"], row["q_len"], row["layout"], row["kv_lora_rank"]) for row in rows} == {
        (dtype, q_len, layout, 256)
        for dtype in ("bfloat16", "float32")
        for q_len in (1, 2)
        for layout in ("paged", "dense")
    }


def test_default_grid(fake: FakeRunners) -> None:
    rows = answer("--budget", "9999h")["plans"]
    assert {row["context"] for row in rows} == {1 << k for k in range(10, 16)}
    assert {row["batch"] for row in rows} == {1, 2, 4, 8}
    assert {row["heads"] for row in rows} == {16, 128}
    assert {(row["dtype"], row["layout"], row["q_len"]) for row in rows} == {
        ("bfloat16", "paged", 1)
    }


def test_a_missing_kernel_is_said(fake: FakeRunners, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FakeBackend("no native kernel in this version", name="cuda")
    monkeypatch.setattr(backends, "get", lambda name: missing)
    monkeypatch.setattr(devices, "probe", lambda choice: make_device(132, "cuda"))
    result = run("--device", "cuda", *TUNE)
    assert "no native kernel in this version; only the mlx paths run" in result.stderr
    assert "mlx_rows" in result.stdout
    assert "no native kernel" in run("plan", "--context", "64k", "--heads", "16").stderr


# --- plan --------------------------------------------------------------------------------------


def test_plan_keys_and_gates(fake: FakeRunners) -> None:
    found = answer("plan", "--context", "1k", "--heads", "16", "--dtype", "fp16")
    assert list(found) == [
        *("path", "partitions", "tile", "source", "reason"),
        *("expected_us", "speedup", "speedup_low", "speedup_high", "baseline", "device"),
    ]
    assert (found["path"], found["source"], found["expected_us"]) == ("mlx", "gates", None)
    assert found["device"] == devices.probe("cpu").key


def test_a_ragged_batch_counts_by_its_work(fake: FakeRunners) -> None:
    run("--budget", "1h", "--contexts", "4k", "--batches", "2", "--heads", "16")
    args = ("plan", "--heads", "16", "--lengths")
    assert answer(*args, "4096,3000,500")["source"] == "tuned"  # effective batch 2
    assert answer(*args, "4096,30,50")["source"] == "gates"  # effective batch 1
    assert answer(*args, "4k,4k", "--batch", "2", "--context", "4k")["source"] == "tuned"


def test_plan_of_a_model(fake: FakeRunners) -> None:
    run("--budget", "1h", "--contexts", "4k", "--batches", "1", "--model", "GLM-4.7-Flash")
    found = answer("plan", "--context", "4k", "--model", "glm 4.7 flash")
    assert found["source"] == "tuned"


def test_off(fake: FakeRunners, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    found = answer("plan", "--context", "1m", "--heads", "16")
    assert (found["path"], found["source"]) == ("mlx", "off")


# --- bench, verify, probe, db ------------------------------------------------------------------


def test_bench(fake: FakeRunners) -> None:
    rows = answer("bench", *GRID, "--partitions", "2,4")
    assert sorted((row["path"], row["partitions"]) for row in rows[:5]) == [
        *(("mlx", 1), ("mlx_rows", 1), ("single", 1), ("split", 2), ("split", 4))
    ]
    assert len(rows) == 10
    text = run("bench", "--heads", "3", "--lengths", "500,20").stdout
    assert "context 500 batch 2 heads 3 bfloat16 512+64 paged ragged" in text


def test_bench_says_which_counts_cannot_run(fake: FakeRunners) -> None:
    args = ("bench", "--contexts", "1k,32k", "--partitions", "64", "--heads", "16")
    result = run(*args, "--json")
    assert "split x64 r16 error: context 1024 makes only 16 pieces" in result.stderr
    rows = {(row["shape"].split()[1], row["path"]): row for row in json.loads(result.stdout)}
    assert rows["1024", "split"]["median_us"] is None
    assert rows["32768", "split"]["executed"] == "split x64 r16"


def test_bench_without_a_single_time(fake: FakeRunners) -> None:
    def broken(plan: Plan):
        raise RuntimeError("no memory")

    fake.options["check_result"] = broken
    result = run("bench", *GRID, code=1)
    assert "RuntimeError: no memory" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: nothing could be timed")


def test_verify(fake: FakeRunners, no_cases: None) -> None:
    assert answer("verify")["plans"] == []  # no database yet, and none is made
    run(*TUNE)
    found = answer("verify")
    assert (found["ok"], found["not_timed"]) == (True, 0)
    assert [row["result"] for row in found["plans"]] == ["ok", "ok"]
    fake.seconds = lambda shape, plan: 9e-3 if plan == MLX else 10e-3
    result = run("verify", code=1)
    assert "slower" in result.stdout
    assert "counts from now on" in " ".join(result.stdout.split())
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert answer("verify")["plans"] == []  # they count no longer
    fake.seconds = lambda shape, plan: 9e-3 if plan == MLX else 1e-3
    assert answer(*TUNE)["tuned"] == 2
    fake.seconds = lambda shape, plan: 9e-3 if plan == MLX else 10e-3
    found = answer("verify", code=1)
    assert [(row["result"], row["now"]) for row in found["plans"]] == [("slower", "mlx")] * 2


def test_db(fake: FakeRunners, db: Path) -> None:
    assert run("db", "path").stdout == f"{db}\n"
    assert answer("db", "path", "--db", "/elsewhere/t.db") == {"path": "/elsewhere/t.db"}
    assert f"no database at {db}: run mla-tune" in error("db", "check")
    assert not db.exists()
    run(*TUNE)
    found = answer("db", "check")
    assert (found["ok"], found["rows"]["plan"]) == (True, 2)
    assert "sound" in run("db", "check").stdout
    with sqlite3.connect(db) as connection:
        connection.execute("DELETE FROM plan")
    connection.close()
    assert answer("db", "rebuild") == {"path": str(db), "plans": 2}
    assert "2 plans derived" in run("db", "rebuild").stdout


def test_damage_exits_with_1(fake: FakeRunners, monkeypatch: pytest.MonkeyPatch, db: Path) -> None:
    run(*TUNE)
    found = {"path": str(db), "ok": False, "problems": ["page 3 is gone"], "schema": 1, "rows": {}}
    monkeypatch.setattr(Store, "check", lambda self: found)
    result = run("db", "check", code=1)
    assert "page 3 is gone" in result.stdout
    assert "is damaged" in result.stderr


def test_probe(db: Path) -> None:
    found = answer("probe")
    assert found["device"] == devices.probe().key
    assert (found["db"]["path"], found["db"]["exists"], found["db"]["plans"]) == (str(db), False, 0)
    assert {row["name"] for row in found["backends"]} == {"cpu", "metal", "cuda"}
    text = run("probe").stdout
    assert found["device"] in text
    assert "not there yet: run mla-tune" in text


# --- the frame ---------------------------------------------------------------------------------


def test_shared_options_may_stand_before_the_command(fake: FakeRunners, tmp_path: Path) -> None:
    other = str(tmp_path / "other.db")
    assert json.loads(run("--json", "--db", other, "db", "path").stdout) == {"path": other}
    assert json.loads(run("--json", "--model", "kimi-k2", "plan", "--context", "1k").stdout)
    assert run("--db", other, "db", "path", "--db", "mine.db").stdout == "mine.db\n"
    assert error("--device", "cuda", "probe").startswith("no cuda device here")


def test_version() -> None:
    assert __version__ in run("--version").stdout


@pytest.mark.parametrize("args", [["--help"], ["plan", "--context", "1k", "--heads", "1"]])
def test_quick_commands_load_nothing_heavy(args: list[str]) -> None:
    code = (
        f"import sys; from mla_tuner.cli import main; main({args!r}, standalone_mode=False); "
        "heavy = ('numpy', 'optuna', 'sqlite_utils', 'pydantic'); "
        "print(*(name for name in heavy if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize(
    "shape",
    [
        ["--context", "5000"],
        ["--context", "20k", "--batch", "3"],
        ["--context", "64k", "--batch", "200"],
        ["--context", "4k", "--q-len", "3", "--layout", "dense"],
        ["--context", "300k", "--heads", "20", "--dtype", "float16"],
        ["--context", "1k", "--geometry", "256+32", "--dtype", "fp32"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("where", [(), ("--db", "my other.db")], ids=len)
def test_what_is_not_tuned_is_told_how_to_tune_it(
    fake: FakeRunners,
    shape: list[str],
    where: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a partial tune, too: that leaves the gates to decide far from it."""
    monkeypatch.chdir(tmp_path)
    run(*TUNE, "--heads", "64")
    asked = ("plan", "--device", "cpu", "--heads", "16", *shape, *where)
    before = answer(*asked)
    assert (before["source"], before["path"]) == ("gates", "mlx")
    _, command = before["reason"].split("; to tune this shape: mla-tune ")
    assert "--device cpu " in command
    assert answer("--budget", "9h", *shlex.split(command))["tuned"] == 1
    assert answer(*asked)["source"] in ("tuned", "fitted")  # the latter for a batch between two
