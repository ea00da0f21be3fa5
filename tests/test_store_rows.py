"""Rows that somebody changed behind the store's back: one line, and the cure."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from fakes import make_device
from test_store import SPLIT, one_line, record, start

from mla_tuner.errors import StoreError
from mla_tuner.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


# Each makes one column of every row of a table hold what can't be there.
BAD_PLANS = [
    *("path = 'warp'", "partitions = 'many'", "partitions = 2.5", "tile = x'00'"),
    *("heads = 'all'", "heads = 1000", "dtype = 'int8'", "layout = CAST(x'ff' AS TEXT)"),
    *("context = 5000", "batch = 1.5", "q_len = 0", "kv_lora_rank = 7", "rope_dim = 'x'"),
    *("speedup = 'abc'", "speedup_low = 'abc'", "speedup_low = NULL", "speedup_high = x'01'"),
    *("median_us = 'abc'", "median_us = -1", "median_us = 9e999", "day = x'01'", "kernel = x'01'"),
]
BAD_EVIDENCE = [
    *("path = 'warp'", "partitions = 'many'", "tile = x'00'", "heads = 'all'", "heads = 1000"),
    *("dtype = 'int8'", "layout = 'ragged'", "context = 'x'", "context = -1", "status = 'odd'"),
    *("ratio = 'abc'", "ratio_low = x'01'", "median_us = 'abc'", "max_error = 'abc'"),
    *("samples_us = 'abc'", "samples_us = '{}'", "samples_us = '[\"a\"]'", "samples_us = x'01'"),
    *("samples_us = '7'", "rounds = 'x'", "message = x'01'", "at = x'01'"),
]
BAD_RUNS = [
    *("run SET device = 'elsewhere'", "run SET kernel = x'01'", "run SET mlx = x'01'"),
    *("run SET id = id + 9", "device SET cores = 'all'", "device SET cores = 1.5"),
]


def spoil(path: Path, change: str) -> None:
    """A database with one winner, changed behind the store's back."""
    with Store(path) as store:
        record(store, start(store))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = 1")
    connection.execute(f"UPDATE {change}")
    connection.commit()
    connection.close()


def assert_check_names_the_cure(store: Store) -> None:
    found = store.check()
    assert not found["ok"]
    problems = found["problems"]
    assert isinstance(problems, list)
    assert problems
    for problem in problems:
        assert "\n" not in problem
        by_sqlite = ("refers to a missing", "CHECK constraint failed")
        assert "db rebuild" in problem or any(text in problem for text in by_sqlite)


@pytest.mark.parametrize("change", BAD_PLANS)
def test_a_malformed_plan_is_one_line_and_can_be_rebuilt(change: str, path: Path) -> None:
    spoil(path, f"plan SET {change}")
    with Store(path, create=False) as store:
        assert_check_names_the_cure(store)
        for read in (store.plans, lambda: store.tuned(make_device(), "digest", "1.0")):
            with pytest.raises(StoreError) as error:
                read()
            assert "mla-tune db rebuild" in one_line(error)
        assert store.rebuild() == 1
        assert store.check()["ok"]
        assert [row.plan for row in store.plans()] == [SPLIT]


@pytest.mark.parametrize(
    "change", [*(f"measurement SET {change}" for change in BAD_EVIDENCE), *BAD_RUNS]
)
def test_malformed_evidence_is_one_line_and_changes_nothing(change: str, path: Path) -> None:
    spoil(path, change)
    with Store(path, create=False) as store:
        assert_check_names_the_cure(store)
        with pytest.raises(StoreError) as error:
            store.rebuild()
        assert "delete it" in one_line(error)
        assert store._db.table("plan").count == 1


def test_deeply_nested_samples_are_malformed(path: Path) -> None:
    spoil(path, f"measurement SET samples_us = '{'[' * 100000}'")
    with Store(path) as store:
        assert_check_names_the_cure(store)
