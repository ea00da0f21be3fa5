"""Reading the table of winners: whatever the file, serving goes on with at most one log line."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fakes import FakeBackend, make_device
from winners import SPLIT, assert_one_line, row, write

from mla_tuner import table
from mla_tuner.policy import Policy
from mla_tuner.shapes import CONTEXT_GRID
from mla_tuner.table import ROW_COLUMNS, checked_row, read_rows


def test_winners_come_back_from_the_store(tmp_path: Path) -> None:
    write(tmp_path / "t.db", 4096, 32768)
    rows = read_rows(tmp_path / "t.db", make_device())
    assert [(r.bucket.context, r.plan, r.speedup_low) for r in rows] == [
        (4096, SPLIT, 95.0),
        (32768, SPLIT, 95.0),
    ]
    assert read_rows(tmp_path / "t.db", make_device(64)) == []


@pytest.fixture
def db(tmp_path: Path) -> Path:
    write(tmp_path / "t.db", 32768)
    return tmp_path / "t.db"


def test_a_missing_table_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(Policy.load(tmp_path / "none.db", make_device())) == 0
    assert_one_line(caplog, "no tuning table at")


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100, b"SQLite format 3\0" * 9])
def test_a_corrupt_table_is_one_line(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.db").write_bytes(content)
    assert len(Policy.load(tmp_path / "t.db", make_device())) == 0
    assert_one_line(caplog, "is not used")


def test_a_truncated_table_is_one_line(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = db.read_bytes()
    db.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    assert len(Policy.load(db, make_device())) == 0
    assert_one_line(caplog, "is not used")


def test_a_newer_table_is_one_line(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    connection = sqlite3.connect(db)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert len(Policy.load(db, make_device())) == 0
    assert_one_line(caplog, "its schema is 99")


def test_an_older_table_is_one_line_with_the_cure(
    db: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(db, "PRAGMA user_version = 1")
    assert len(Policy.load(db, make_device())) == 0
    assert_one_line(caplog, "its schema is 1, this version reads 3: that takes `mla-tune db")


@pytest.mark.parametrize(
    ("stored", "here", "counts"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True), ("", "", True)],
)
def test_an_unknown_system_is_not_a_different_one(stored: str, here: str, counts: bool) -> None:
    assert row(system=stored).counts("digest", row().mlx, here) == counts
    assert not row(system=stored).counts("other", row().mlx, here)
    assert not row(system=stored).counts("digest", "0.1", here)


def test_winners_come_in_the_order_they_were_found_in(db: Path) -> None:
    """Not of the clock: the last of a bucket is the one that counts."""
    change(db, "UPDATE plan SET day = '2099-01-01', system = 'then'")
    write(db, 32768)
    assert [r.system for r in read_rows(db, make_device())] == ["then", ""]


def test_a_table_without_plans_is_one_line(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(db, "DROP TABLE plan")
    assert len(Policy.load(db, make_device())) == 0
    assert_one_line(caplog, "is not used")


def change(db: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(db)) as connection:
        connection.execute(statement, values)
        connection.commit()


TEXTS = ("dtype", "layout", "path", "tile", "day", "kernel", "mlx", "system", "stage")
OR_NULL = ("speedup_low", "speedup_high", "single_speedup", "split_speedup")
AMOUNTS = ("median_us", "speedup", *OR_NULL)
INF = float("inf")


def raw(**changes: object) -> list[object]:
    """The values of a good row, in the order of the columns, with some replaced."""
    good = row()
    values = dict(
        zip(ROW_COLUMNS, (*good.bucket, *vars(good.plan).values(), *good[2:]), strict=True)
    )
    return list((values | changes).values())


def test_a_good_row_comes_back() -> None:
    assert checked_row(raw()) == row()
    half = raw(speedup=1, speedup_low=None, speedup_high=None)  # ints are numbers, too
    assert checked_row(half) == row(speedup=1, speedup_low=None, speedup_high=None)


@pytest.mark.parametrize("column", ROW_COLUMNS)
def test_each_column_has_its_type(column: str) -> None:
    """Every column with every wrong type: one line that names it."""
    wrong: tuple[object, ...] = (None, b"", b"\xff", [], "abc", "", 2.5, 2.0, INF, "3", True)
    if column in TEXTS:
        wrong = (None, b"", b"bfloat16", [], 2, 2.5, "two\nlines", "\x1b[31m")
    elif column in AMOUNTS:
        wrong = (None, b"", b"1", [], "", "abc", "1.5", -1, -0.5, INF, -INF, float("nan"))
    for value in wrong:
        if value is None and column in OR_NULL:
            continue
        with pytest.raises(ValueError, match=rf"column {column} as ") as caught:
            checked_row(raw(**{column: value}))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "warp"}, "path in"),
        ({"path": "mlx"}, "partitions in 1..1"),
        ({"path": "mlx", "partitions": 1}, "no tile"),
        ({"partitions": 1}, "partitions in 2..256"),
        ({"partitions": 1000}, "partitions in 2..256"),
        ({"context": 0}, "context, batch, q_len of a bucket"),
        ({"context": 1000}, "context, batch, q_len of a bucket"),
        ({"context": -1024}, "context in 0.."),
        ({"batch": 3}, "context, batch, q_len of a bucket"),
        ({"q_len": 3}, "context, batch, q_len of a bucket"),
        ({"q_len": 99}, "q_len in 1..8"),
        ({"heads": 5000}, "heads in 1..128"),
        ({"dtype": "int8"}, "dtype in"),
        ({"layout": "sparse"}, "layout in"),
        ({"kv_lora_rank": 128}, "geometry in"),
        ({"rope_dim": 7}, "geometry in"),
        ({"speedup_low": None}, "both or neither"),
        ({"speedup_high": None}, "both or neither"),
    ],
)
def test_columns_go_together(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"expected .*{words}"):
        checked_row(raw(**changes))


@pytest.mark.parametrize("column", ROW_COLUMNS)
@pytest.mark.parametrize(
    "value",
    ["abc", "", "9", b"\xff\x00", b"", 2.5, -1, 0, 10**15, INF, None, "two\nlines"],
    ids=repr,
)
def test_a_malformed_table_is_one_line(
    column: str, value: object, db: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        change(db, f"UPDATE plan SET {column} = ?", value)
    except sqlite3.IntegrityError:  # NOT NULL: such a table can't be made
        return
    table = Policy(make_device(), read_rows(db, make_device()), backend=FakeBackend())
    if len(table) or not caplog.records:
        assert caplog.records == []  # harmless here, e.g. another heads count or day
    else:
        assert_one_line(caplog, "is not used")
    for context in (*CONTEXT_GRID, 0, 10**9):
        decision = table.decide(context, 1, 16, "bfloat16")
        assert "\n" not in decision.reason


def test_text_that_is_not_utf8_is_one_line(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(db, "UPDATE plan SET day = CAST(x'ff41' AS TEXT)")
    assert len(Policy.load(db, make_device())) == 0
    assert_one_line(caplog, "is not used")


def test_a_locked_table_is_one_line(
    db: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "LOCK_WAIT_S", 0.01)
    holder = sqlite3.connect(db)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert len(Policy.load(db, make_device())) == 0
    finally:
        holder.close()
    assert_one_line(caplog, "locked")


def test_a_locked_table_in_a_read_only_folder_is_not_read_around_the_lock(
    db: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table.os, "access", lambda *_: False)
    test_a_locked_table_is_one_line(db, caplog, monkeypatch)


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device", "a socket"])
def test_what_is_no_file_is_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"a device": Path("/dev/null")}.get(kind, Path("here"))
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("here")
    assert len(Policy.load(path, make_device())) == 0
    assert_one_line(caplog, f"{path} is not used (it is {kind}): the gates decide")


@pytest.mark.parametrize("name", ["none.db", "file/none.db", "broken-link"])
def test_what_is_not_there_is_no_table(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken-link").symlink_to(tmp_path / "nowhere")
    assert read_rows(tmp_path / name, make_device()) == []
    assert_one_line(caplog, "no tuning table at")


@pytest.mark.parametrize("name", ["x" * 5000, "\udcff.db", "a\0b", "link"])
def test_what_can_not_be_a_path_is_one_line(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "\udcff.db").touch()
    assert read_rows(tmp_path / name, make_device()) == []
    assert_one_line(caplog, "is not used")


def read_without_rights(folder: Path) -> tuple[str, str]:
    """How many rows a process finds in t.db that may not write to the folder, and its stderr."""
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from fakes import make_device; from mla_tuner.table import read_rows\n"
        "os.geteuid() or os.setuid(65534)  # root writes everywhere\n"
        "print(len(read_rows(Path(sys.argv[1]), make_device())))"
    )
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder / "t.db"), str(Path(__file__).parent)],
            capture_output=True,
            text=True,
        )
    finally:
        folder.chmod(0o755)
    return done.stdout.strip(), done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may read, too; pytest's own are private."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_table_in_a_read_only_folder_is_read(open_folder: Path) -> None:
    """A closed WAL file needs side files that nobody may make there."""
    write(open_folder / "t.db", 32768)
    assert read_without_rights(open_folder) == ("1", "")


def test_a_left_over_wal_in_a_read_only_folder_is_one_line(
    open_folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "t.db", 32768)
    with closing(sqlite3.connect(tmp_path / "t.db")) as writer:
        writer.execute("UPDATE plan SET partitions = 4")
        writer.commit()
        for name in ("t.db", "t.db-wal"):  # as a crash leaves them
            shutil.copy(tmp_path / name, open_folder)
    assert (open_folder / "t.db-wal").stat().st_size
    rows, log = read_without_rights(open_folder)
    assert rows == "0"
    assert len(log.splitlines()) == 1
    assert "t.db-wal holds changes that can't be read in a read-only folder" in log
