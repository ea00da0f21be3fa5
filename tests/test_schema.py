"""Each schema version is made from the one before, and nothing that was measured is lost."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fakes import make_device
from test_store import SINGLE, SPLIT, one_line, record, start

from mla_tuner import schema
from mla_tuner.errors import StoreError
from mla_tuner.plan import MLX
from mla_tuner.store import Store
from mla_tuner.table import SCHEMA_VERSION, read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database as version 1 left it: three winners of one MLX, one of another."""
    new = tmp_path / "new.db"
    with Store(new) as store:
        run = start(store)
        for context, plan in ((1024, SINGLE), (2048, SPLIT), (4096, SPLIT)):
            record(store, run, context, plan=plan)
        record(store, start(store, mlx="2.0"), 2048, low=1.0)
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as connection:
        connection.execute(
            "CREATE TABLE _sqlite_migrations (id INTEGER PRIMARY KEY, migration_set TEXT, "
            "name TEXT, applied_at TEXT)"
        )
        for statement in schema.VERSION_1:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO _sqlite_migrations VALUES (1, 'mla_tuner', 'create_tables', '')"
        )
        connection.execute("ATTACH ? AS new", [str(new)])
        for table in schema.TABLES:
            names = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
            columns = ", ".join(names)
            connection.execute(
                f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}"
            )
        connection.commit()
    return old


def rows(path: Path, table: str) -> list[dict[str, object]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY rowid")]


def test_version_1_is_carried_on_without_losing_evidence(path: Path) -> None:
    before = {table: rows(path, table) for table in ("device", "run", "measurement")}
    with Store(path) as store:
        assert store.check()["ok"]
        winners = [(row.bucket.context, row.plan, row.mlx, row.system) for row in store.plans()]
        assert winners == [
            (1024, SINGLE, "1.0", ""),
            (2048, SPLIT, "1.0", ""),
            (2048, MLX, "2.0", ""),
            (4096, SPLIT, "1.0", ""),
        ]
        assert [row.split_speedup for row in store.plans()] == [None, 100.0, 6.0, 100.0]
        assert store._db.table("threshold").count == 2
        assert {row.baseline for row in store.plans()} == {"mlx"}
        record(store, start(store), 8192)
        derived = store.plans()
        store.rebuild()
        assert store.plans() == derived
    for table, old in before.items():
        now = rows(path, table)[: len(old)]
        assert [{name: row[name] for name in old[0]} for row in now] == old
    assert len(read_rows(path, make_device())) == 5


def test_both_ways_to_the_newest_version_make_the_same_tables(path: Path, tmp_path: Path) -> None:
    Store(path).close()
    Store(tmp_path / "fresh.db").close()
    assert shape(path) == shape(tmp_path / "fresh.db")


def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: connection.execute(f"PRAGMA table_info({table})").fetchall()
            for table in schema.TABLES
        }


def test_evidence_that_nobody_can_read_does_not_stop_the_migration(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE measurement SET ratio = 'abc' WHERE id = 1")
        connection.execute("UPDATE measurement SET samples_us = 'abc'")
        connection.commit()
    with Store(path) as store:  # the winners were copied
        assert [row.plan for row in store.plans()] == [SINGLE, SPLIT, MLX, SPLIT]
        assert not store.check()["ok"]


def test_who_only_reads_says_so_in_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with pytest.raises(StoreError) as error:
        Store(path, create=False)
    assert "has schema 1, this mla-tuner uses 3: `mla-tune db rebuild`" in one_line(error)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for options in ({"create": True}, {"create": False, "upgrade": True}):
        with pytest.raises(StoreError) as error:
            Store(path, **options)
        assert "where it can be written" in one_line(error)
    assert path.read_bytes() == before


def test_who_may_write_carries_it_on(path: Path) -> None:
    with Store(path, create=False, upgrade=True) as store:
        assert store.check()["schema"] == SCHEMA_VERSION == 3
        assert store.rebuild() == 4


def test_a_migration_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "VERSION_2", (*schema.VERSION_2[:-1], "DROP TABLE missing"))
    with pytest.raises(StoreError) as error:
        Store(path)
    assert "no such table" in one_line(error)
    assert rows(path, "plan")
    assert "system" not in rows(path, "plan")[0]
    monkeypatch.undo()
    Store(path).close()
