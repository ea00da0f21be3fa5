"""What `mla-tune` says when it can't: known failures in one line, wrong usage."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import TUNE, answer, error, lines, run
from fakes import FakeRunners

from mla_tuner import cli
from mla_tuner import device as devices


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where MLA_TUNER_DB points in every test."""
    return tmp_path / "tuning.db"


def test_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu", lambda: ("", {}))
    assert error("--device", "metal").startswith("no metal device here: MLX ")


def test_unknown_model() -> None:
    assert "did you mean DeepSeek-V3" in error("--model", "deepsek-v3")


DB_COMMANDS = [
    TUNE,
    ["probe"],
    ["plan", "--context", "1k", "--heads", "16"],
    ["verify"],
    *(["db", name] for name in ("check", "rebuild", "path")),
]


@pytest.mark.parametrize("command", DB_COMMANDS, ids=" ".join)
def test_odd_database_paths_are_one_line(
    fake: FakeRunners,
    no_cases: None,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path in ("~nosuchuser/t.db", "x" * 4000, "/dev/null"):
        assert len(lines(*command, "--db", path)) <= 1
    for path in ("~nosuchuser/t.db", str(tmp_path), "/dev/null"):
        monkeypatch.setenv("MLA_TUNER_DB", path)
        assert len(lines(*command)) <= 1


@pytest.mark.parametrize("command", DB_COMMANDS, ids=" ".join)
def test_a_forbidden_folder_is_one_line(
    fake: FakeRunners,
    no_cases: None,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = Path.stat

    def denied(path: Path, **options: bool) -> os.stat_result:
        if path.name == "t.db":
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    assert len(lines(*command, "--db", str(tmp_path / "t.db"))) <= 1


@pytest.mark.parametrize("command", DB_COMMANDS, ids=" ".join)
def test_a_malformed_table_is_one_line(
    fake: FakeRunners, no_cases: None, command: list[str], db: Path
) -> None:
    run(*TUNE)
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE plan SET path = 'warp', median_us = 'abc'")
    connection.close()
    assert len(lines(*command)) <= 1


def test_a_malformed_table_is_found_and_rebuilt(fake: FakeRunners, db: Path) -> None:
    run(*TUNE)
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE plan SET speedup = 'abc' WHERE context = 1024")
    connection.close()
    assert "expected column speedup" in error(*TUNE)
    result = run("db", "check", code=1)
    assert "mla-tune db rebuild" in result.stdout.replace("\n", " ")
    run("db", "rebuild")
    assert answer("db", "check")["ok"]
    assert answer(*TUNE)["already_tuned"] == 2


@pytest.mark.parametrize("command", [["db", "check"], ["db", "rebuild"], TUNE, ["verify"]])
def test_a_foreign_database_is_not_touched(
    fake: FakeRunners, no_cases: None, command: list[str], db: Path
) -> None:
    with sqlite3.connect(db) as connection:
        connection.execute("CREATE TABLE bookmark (url TEXT)")
    connection.close()
    before = db.read_bytes()
    assert "database of another program" in error(*command)
    assert db.read_bytes() == before
    assert [path.name for path in db.parent.glob("*.db*")] == [db.name]


def test_unusable_databases(fake: FakeRunners, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.db"
    corrupt.write_bytes(b"this is no database" * 1000)
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    under_a_file = corrupt / "tuning.db"
    for path, text in (
        (corrupt, "not a database"),
        (newer, "has schema 999"),
        (under_a_file, "cannot use the database"),
    ):
        assert text in error(*TUNE, "--db", str(path))
    for path in (corrupt, newer):
        assert str(path) in error("db", "check", "--db", str(path))
        # Serving, and the command that shows what it does, go on without.
        decision = answer("plan", "--context", "1k", "--heads", "1", "--db", str(path))
        assert decision["source"] == "gates"


@pytest.mark.parametrize(
    "args",
    [
        ["--budget", "5x"],
        ["--budget", "0s"],
        ["--contexts", "100"],  # below the grid: it has no bucket
        ["--contexts", "2m"],
        ["--contexts", ""],
        ["--heads", "0"],
        ["--heads", "129"],
        ["--batches", "-1"],
        ["--dtypes", "int8"],
        ["--layouts", "ragged"],
        ["--q-lens", "9"],
        ["--geometry", "384+64"],
        ["--device", "tpu"],
        ["--nonsense"],
        ["nonsense"],
        ["plan"],
        ["plan", "--context", "4k"],
        ["plan", "--heads", "16"],
        ["plan", "--context", "4k", "--heads", "16", "--lengths", "1,2"],
        ["plan", "--batch", "3", "--heads", "16", "--lengths", "1,2"],
        ["plan", "--context", "3000000000", "--heads", "16"],
        ["bench", "--lengths", "0,0"],
        ["bench", "--lengths", "5,5", "--contexts", "1k"],
        ["bench", "--lengths", "5,6", "--batches", "2"],
        ["bench", "--partitions", "4", "--paths", "single"],
        ["bench", "--partitions", "257"],
        ["bench", "--partitions", "1"],
        ["bench", "--paths", "magic"],
        ["--budget", "5m", "plan", "--context", "4k", "--heads", "16"],
        ["--heads", "16", "verify"],
        ["--model", "kimi-k2", "verify"],
        ["--geometry", "512+64", "probe"],
        ["--device", "cpu", "db", "path"],
        ["db"],
    ],
)
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    result = run(*args, code=2)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--lengths", "1,2", "--context", "4096"], "expected 2 lengths with maximum 4096; got"),
        (["--lengths", "1,2", "--batch", "3"], "expected 3 lengths with maximum 2; got (1, 2)"),
        (["--context", "2000m"], "expected context in 0..1073741824; got 2097152000"),
    ],
)
def test_what_the_shape_refuses_is_told_without_its_name(args: list[str], says: str) -> None:
    assert error("plan", *args, "--heads", "16", code=2).startswith(says)


@pytest.mark.parametrize("change", ["path = 'warp'", "partitions = 999", "heads = 500"])
def test_no_line_of_a_command_names_what_checked_a_value(
    fake: FakeRunners, no_cases: None, db: Path, change: str
) -> None:
    run(*TUNE)
    with sqlite3.connect(db) as connection:
        connection.execute(f"UPDATE plan SET {change}")
        connection.execute(f"UPDATE measurement SET {change}")
    connection.close()
    commands = [TUNE, ["probe"], ["verify"], ["report"], ["db", "check"], ["share", "export"]]
    said = [CliRunner().invoke(cli.main, each) for each in commands]
    assert any("expected " in each.output for each in said)
    assert not [each.output for each in said if re.search(r"\[\w+\] expected", each.output)]


def test_a_bad_value_says_what_was_expected() -> None:
    line = error("--contexts", "1k,x", code=2)
    assert "'--contexts': expected 1024..1048576, such as 4096 or 4k; got 'x'" in line
