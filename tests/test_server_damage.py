"""A row of the shared file that somebody else changed is left out and named; all others stay."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from server_tables import CPU, SPLIT, Server, links, repeated, table

from mla_tuner import share
from mla_tuner.server import archive
from mla_tuner.server.reading import Reading
from mla_tuner.shapes import Bucket
from mla_tuner.table import BUCKET_COLUMNS

pytest.importorskip("datasette", reason="datasette is not installed")

EVIDENCE = ("hash", "run", *BUCKET_COLUMNS, "body")
VALUES = ["", "x", "{}", "[" * 10_000, "<b>\n", -1, 1.5, 1 << 62, b"\xff\0"]
FIRST = {"evidence": "id = 1", "run": "id = (SELECT run FROM evidence WHERE id = 1)"}
PLACES = [("evidence", column, VALUES) for column in EVIDENCE]
PLACES += [("run", column, VALUES) for column in ("facts", "body")]
PLACES += [("run", "family", ["", "{}", "a b", "../x", -1, b"\xff\0"])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two runs, each with a row; anything may be written into it."""
    path = tmp_path / "shared.db"
    archive.prepare(path, create=True)
    with closing(sqlite3.connect(path)) as db, db:
        for each in (table(tmp_path, 1024), second(tmp_path)):
            archive.add(db, each, "alice")
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
            db.execute(f"DROP TRIGGER {name}")
    return path


def second(folder: Path) -> share.SharedTable:
    return repeated(table(folder, 1024), 1)


def damage(db: sqlite3.Connection, where: str, column: str, value: object) -> None:
    """Change what the first row says, or its run."""
    db.execute(f"UPDATE {where} SET {column} = ? WHERE {FIRST[where]}", [value])


def assert_first_is_left_out(db: sqlite3.Connection, folder: Path, what: object) -> None:
    reading = Reading()
    for _ in range(2):  # it is said once
        reading.refresh(db)
    (line,) = reading.left_out
    assert line.startswith("row 1, "), what
    assert line.isprintable(), what
    assert reading.text(CPU.family, "") == share.render(second(folder)), what
    assert list(reading.tables) == [CPU.family]


@pytest.mark.parametrize(("where", "column", "values"), PLACES)
def test_any_damage_is_seen(
    path: Path, tmp_path: Path, where: str, column: str, values: list[object]
) -> None:
    for value in values:
        with closing(sqlite3.connect(path)) as db:  # which takes it back
            damage(db, where, column, value)
            assert_first_is_left_out(db, tmp_path, (column, value))


def forged(folder: Path) -> Iterator[tuple[Bucket, dict[str, object]]]:
    """Evidence that can't be there."""
    (device,) = table(folder, 1024).devices
    (this,) = device.buckets
    (entry,) = this.evidence
    for change in ({"dtype": "x"}, {"context": 1000}, {"heads": 0}, {"batch": 3}, {"layout": ""}):
        yield this.bucket._replace(**change), entry.model_dump()
    for more in ({"partitions": 1}, {"path": "x"}, {"run": "f" * 16}, {"samples_us": [0.0]}):
        yield this.bucket, {**entry.model_dump(), **more}


def test_a_hash_alone_makes_no_evidence(path: Path, tmp_path: Path) -> None:
    for bucket, entry in forged(tmp_path):
        body = json.dumps(entry)
        told = {**bucket._asdict(), "body": body, "hash": archive._digest(bucket, body)}
        with closing(sqlite3.connect(path)) as db:
            for column, value in told.items():
                damage(db, "evidence", column, value)
            assert_first_is_left_out(db, tmp_path, told)


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("evidence", "body = '{}'"),
        ("evidence", "body = CAST(x'ff' AS TEXT)"),  # no UTF-8
        ("evidence", "context = '<b>'"),
        ("evidence", "run = 'nobody'"),
        ("run", "facts = '{}'"),
        ("run", "body = ''"),
        ("run", "family = x'ff'"),
    ],
)
def test_pages_show_the_rest_and_name_it(
    path: Path, tmp_path: Path, where: str, change: str
) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {where} SET {change} WHERE {FIRST[where]}")
    server = Server(path, None)
    page = server.get("/-/tuning").text
    assert "<p>Left out, 1 row of evidence: row 1, " in page
    assert "<b>" not in page
    (device,) = links(page, "device")
    (bucket,) = links(server.get(device).text, "bucket")
    assert "test CPU" in page
    assert str(SPLIT) in server.get(bucket).text
    assert len(server.get("/-/tuning.json").json()["devices"]) == 1
    assert server.get(f"/-/tuning/tables/{CPU.family}.json").text == share.render(second(tmp_path))
    server.datasette.close()
