"""A frozen table is used whole and unchanged, or every shape runs `mlx`."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes import FakeBackend, make_device
from winners import SPLIT, row, write

from mla_tuner import backends, cli, frozen
from mla_tuner import device as devices
from mla_tuner.device import MLX_VERSION, system_version
from mla_tuner.errors import StoreError
from mla_tuner.plan import MLX, Decision
from mla_tuner.policy import Policy
from mla_tuner.table import Row

DEVICE = make_device()


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend())


def put(folder: Path, rows: list[Row] | None = None) -> str:
    """Freeze rows into a folder; the digest."""
    data, _ = frozen.freeze(rows or [row(32768), row(65536)], DEVICE)
    digest = frozen.digest_of(data)
    frozen.write(frozen.place(folder, digest), data)
    return digest


def put_text(folder: Path, text: str) -> str:
    digest = frozen.digest_of(text.encode())
    frozen.place(folder, digest).write_text(text)
    return digest


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Policy]:
    """Loads a policy as a server does that requires a digest, beside the database of a test."""

    def load(digest: str) -> Policy:
        monkeypatch.setenv("MLA_TUNER_FROZEN", digest)
        return Policy.load(tmp_path / "t.db", DEVICE)

    return load


def decide(policy: Policy, context: int = 32768) -> Decision:
    return policy.decide(context, 1, 16, "bfloat16")


def test_the_same_rows_make_the_same_bytes() -> None:
    rows = [row(65536), row(32768), row(32768, median_us=1.0)]
    data, taken = frozen.freeze(rows, DEVICE)
    assert taken == [row(32768, median_us=1.0), row(65536)]
    assert data == frozen.freeze([row(32768, median_us=1.0), row(65536)], DEVICE)[0]
    table = json.loads(data)
    assert data == json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert (table["format"], table["device"]) == (frozen.FORMAT, DEVICE.key)
    assert [values[0] for values in table["rows"]] == [32768, 65536]


def test_only_what_counts_is_frozen() -> None:
    stale = [row(kernel="other"), row(mlx="0.1"), row(system="another")]
    with pytest.raises(StoreError, match=r"no plan counts here for .*: run mla-tune"):
        frozen.freeze(stale, DEVICE)
    good = row(65536, system=system_version())
    assert frozen.freeze([*stale, good], DEVICE)[1] == [good]


@pytest.mark.parametrize("digits", [12, 13, 64])
def test_a_table_is_found_by_its_digest(
    digits: int, loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = put(tmp_path)
    write(tmp_path / "t.db", 1024)  # what is tuned later changes nothing
    with caplog.at_level(logging.INFO, "mla_tuner"):
        policy = loaded(digest[:digits].upper())
    assert caplog.messages == [f"frozen table {digest}: 2 plans for {DEVICE.key}"]
    assert set(os.listdir(tmp_path)) == {f"frozen-{digest[:12]}.json", "t.db"}  # only read
    found = decide(policy)
    assert (found.plan, found.source) == (SPLIT, "tuned")
    assert found.reason.startswith(f"frozen table {digest[:12]}: tuned on a device like this 2")
    elsewhere = decide(policy, 1024)
    assert (elsewhere.plan, elsewhere.source) == (MLX, "off")
    assert elsewhere.reason.startswith(f"frozen table {digest[:12]}: no plan for this bucket")
    assert len(policy) == 2


def test_no_table_is_required_by_default(loaded, tmp_path: Path) -> None:
    put(tmp_path)
    write(tmp_path / "t.db", 1024)
    assert len(loaded("")) == 1


def assert_all_mlx(policy: Policy, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """`mlx` with the reason for every shape, and one log line."""
    for context in (1024, 32768, 1 << 20):
        found = decide(policy, context)
        assert (found.plan, found.source) == (MLX, "off")
        assert text in found.reason
    assert [(r.name, r.levelno) for r in caplog.records] == [("mla_tuner", logging.WARNING)]
    assert text in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


@pytest.mark.parametrize("digest", ["abc", "g" * 64, "a" * 65, "../../../etc/passwd", "\n", "a\0b"])
def test_a_digest_has_digits(digest: str, tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(os.environ, "get", {"MLA_TUNER_FROZEN": digest}.get)
    policy = Policy.load(tmp_path / "t.db", DEVICE)
    assert_all_mlx(policy, "expected 12 to 64 digits of its digest", caplog)


def test_a_missing_table(loaded, caplog) -> None:
    assert_all_mlx(loaded("0" * 64), "frozen-000000000000.json: No such file", caplog)


def test_a_changed_table(loaded, tmp_path: Path, caplog) -> None:
    digest = put(tmp_path)
    path = frozen.place(tmp_path, digest)
    path.write_bytes(path.read_bytes().replace(b"split", b"singl"))
    assert_all_mlx(loaded(digest), "it has changed", caplog)


def test_another_table_with_the_same_beginning(loaded, tmp_path: Path, caplog) -> None:
    digest = put(tmp_path)
    assert_all_mlx(loaded(digest[:12] + "0" * 52), "it has changed", caplog)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kernel": "other"}, "made with another kernel"),
        ({"mlx": "0.1"}, f"made with MLX 0.1, this is {MLX_VERSION}"),
        ({"system": "another"}, "made on another, this is "),
    ],
)
def test_a_table_of_other_versions(
    changes: dict[str, object], text: str, loaded, tmp_path: Path, caplog
) -> None:
    put_table = json.loads(frozen.freeze([row()], DEVICE)[0])
    put_table["rows"] = [frozen._values(row(**changes))]
    assert_all_mlx(loaded(put_text(tmp_path, json.dumps(put_table))), text, caplog)


def test_a_table_without_the_kernel_says_why(
    loaded, tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(tmp_path)
    missing = FakeBackend(reason="the kernel was not built", kernel="")
    monkeypatch.setattr(backends, "get", lambda name: missing)
    assert_all_mlx(loaded(digest), "the kernel was not built", caplog)


def test_a_table_of_another_device(loaded, tmp_path: Path, caplog) -> None:
    data, _ = frozen.freeze([row()], make_device(64))
    assert_all_mlx(loaded(put_text(tmp_path, data.decode())), "it is for 'cpu/x86_64", caplog)


GOOD = {"format": frozen.FORMAT, "device": DEVICE.key}
VALUES = frozen._values(row())


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "{", "[" * 100_000, '{"format": "mla-tuner frozen table 2"}', "\x00"),
        json.dumps(GOOD),
        json.dumps({**GOOD, "columns": ["context"], "rows": []}),
        *(
            json.dumps({**GOOD, "columns": frozen.ROW_COLUMNS, "rows": rows})
            for rows in (7, None, "abc", [7], [[]], [VALUES[:-1]], [None], ["x" * len(VALUES)])
        ),
        *(
            json.dumps({**GOOD, "columns": frozen.ROW_COLUMNS, "rows": [values]})
            for place in range(len(VALUES))
            for values in ([*VALUES[:place], {"x": []}, *VALUES[place + 1 :]],)
        ),
    ],
)
def test_a_table_with_what_cannot_be_there(text: str, loaded, tmp_path: Path, caplog) -> None:
    """Foreign data, digest or not: nothing gets past the checks of a stored row."""
    assert_all_mlx(loaded(put_text(tmp_path, text)), "is not used: ", caplog)


def test_what_is_no_file(loaded, tmp_path: Path, caplog) -> None:
    os.mkfifo(frozen.place(tmp_path, "1" * 12))
    assert_all_mlx(loaded("1" * 12), "is a pipe", caplog)


def test_a_giant_file_is_not_read(loaded, tmp_path: Path, caplog) -> None:
    with frozen.place(tmp_path, "1" * 12).open("wb") as file:
        file.truncate(frozen.MAX_BYTES + 1)
    assert_all_mlx(loaded("1" * 12), "more than 64 MB", caplog)


def test_a_home_that_is_not_there(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER_FROZEN", "1" * 12)
    monkeypatch.setenv("MLA_TUNER_DB", "~nosuchuser/t.db")
    assert_all_mlx(Policy.load(device=DEVICE), "cannot use MLA_TUNER_DB", caplog)


def test_off_comes_first(loaded, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    assert decide(loaded("1" * 12)).reason == "MLA_TUNER=off"
    assert caplog.records == []


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database with a winner for the device that commands find."""
    monkeypatch.setattr(devices, "probe", lambda choice: DEVICE)
    monkeypatch.setattr(devices, "use", lambda device: None)
    write(tmp_path / "t.db", 32768)
    return tmp_path / "t.db"


def freeze(db: Path, *args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, ["db", "freeze", "--db", str(db), *args])
    assert result.exit_code == code, result.output
    return result


def test_the_command_puts_it_where_serving_looks(db: Path, loaded) -> None:
    found = json.loads(freeze(db, "--json").stdout)
    digest = found["digest"]
    path = frozen.place(db.parent, digest)
    assert found == {"path": str(path), "digest": digest, "rows": 1, "imported": {}}
    assert decide(loaded(digest)).plan == SPLIT
    out = db.parent / "x.json"
    text = freeze(db, "--out", str(out)).stdout
    assert text == f"1 plan frozen in {out}\nto require them: MLA_TUNER_FROZEN={digest}\n"
    assert frozen.digest_of(out.read_bytes()) == digest


def import_run(db: Path, *contexts: int, kernel: str = "digest") -> None:
    """Another run, with a number as imported ones have it."""
    write(db, *contexts, kernel=kernel)
    with closing(sqlite3.connect(db)) as connection:
        last, first = connection.execute("SELECT max(id), min(0, min(id)) FROM run").fetchone()
        for table, column in (("plan", "run"), ("measurement", "run"), ("run", "id")):
            change = f"UPDATE {table} SET {column} = ? WHERE {column} = ?"
            connection.execute(change, [first - 1, last])
        connection.commit()


def test_the_command_says_which_plans_were_imported_and_from_whom(db: Path) -> None:
    import_run(db, 1024, kernel="other")  # does not count
    import_run(db, 65536)
    found = json.loads(freeze(db, "--json").stdout)
    assert (found["rows"], found["imported"]) == (2, {"test": 1})
    assert "\ntuned on another test (imported): 1 bucket\n" in freeze(db).stdout
    import_run(db, 2048, 4096)
    assert "\ntuned on another test (imported): 3 buckets\n" in freeze(db).stdout
    write(db, 2048, 4096, 65536)  # tuned here after all
    assert json.loads(freeze(db, "--json").stdout)["imported"] == {}


def test_the_command_says_what_it_cannot_do(db: Path) -> None:
    assert "cannot write" in freeze(db, "--out", "/dev/null/x.json", code=1).stderr
    assert "no database at" in freeze(db.with_name("none.db"), code=1).stderr
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("UPDATE plan SET kernel = 'other'")
        connection.commit()
    assert "no plan counts here" in freeze(db, code=1).stderr


def test_a_table_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StoreError, match=r"cannot write .*x\.json: [NF]\w+"):
            frozen.write(folder / "x.json", b"1")
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which root could replace
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StoreError, match="it is there, and no file"):
            frozen.write(path, b"1")
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
