"""Databases merge as evidence: every run once, whatever the order, and a failure leaves nothing."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from commands import answer, error
from share_tables import H200, SPLIT, any_kernel, duel, fill, start, table_of

from mla_tuner import share, share_databases
from mla_tuner.errors import ShareError
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store

__all__ = ["any_kernel"]  # the fixture
SHAPE = Shape(32768, 1, 16)


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All but the numbers that rows happen to have."""
    with closing(sqlite3.connect(path)) as connection:
        runs = dict(connection.execute("SELECT id, started || options FROM run").fetchall())
        rows = {}
        for name in ("device", "plan", "threshold"):
            rows[name] = sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=str)
        found = connection.execute("SELECT * FROM measurement").fetchall()
        rows["measurement"] = sorted(((runs[row[1]], *row[2:]) for row in found), key=str)
        rows["run"] = sorted(connection.execute("SELECT * FROM run").fetchall(), key=str)
    return rows


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three machines, of which two are the same device, and the last knows half of the first."""
    fill(tmp_path / "a.db", seed=1).close()
    fill(tmp_path / "b.db", seed=2).close()
    shutil.copy(tmp_path / "b.db", tmp_path / "c.db")
    with Store(tmp_path / "b.db") as store:
        shape = Shape(16384, 1, 16)
        store.record(1, shape.bucket, duel(shape, SPLIT), duel(shape, SPLIT))
    with Store(tmp_path / "c.db") as store:
        run = start(store, H200.__class__("cuda", "sm_90", "nvidia-sm90", 132, 80, "H100", 1))
        store.record(run, SHAPE.bucket, (), duel(SHAPE, Plan("split", 32, "r16")))
    return [tmp_path / f"{name}.db" for name in "abc"]


def merge(tmp_path: Path, *files: Path) -> Path:
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
    share_databases.merge(out, files)
    return out


def test_every_run_is_there_once_in_any_order(files: list[Path], tmp_path: Path) -> None:
    a, b, c = files
    one = content(merge(tmp_path, a, b, c))
    assert [len(one[name]) for name in ("device", "run")] == [2, 3]
    assert len(one["measurement"]) == 10 + 14 + 2  # the copy in c is a part of b
    assert content(merge(tmp_path, c, b, a)) == one
    assert content(merge(tmp_path, merge(tmp_path, a, b), c)) == one
    assert content(merge(tmp_path, a, merge(tmp_path, c, b, a))) == one


def test_a_merged_database_is_like_any_other(files: list[Path], tmp_path: Path) -> None:
    with Store(merge(tmp_path, *files)) as store:
        assert store.check()["ok"]
        before = store.plans()
        assert len(before) == 4 + 1
        store.rebuild()
        assert store.plans() == before
        (table,) = share.tables(store)
    (bucket,) = (b for b in table.devices[0].buckets if b.bucket == SHAPE.bucket)
    assert len(bucket.evidence) == 2


@pytest.mark.usefixtures("any_kernel")
def test_a_run_that_was_imported_elsewhere_is_the_same_run(tmp_path: Path) -> None:
    first = table_of(tmp_path / "a.db", duel(SHAPE, SPLIT))
    with Store(tmp_path / "b.db") as store:
        share.into_store(first, store)
    found = content(merge(tmp_path, tmp_path / "b.db", tmp_path / "a.db"))
    assert len(found["run"]) == 1
    assert found["measurement"] == content(merge(tmp_path, tmp_path / "a.db"))["measurement"]


def test_what_can_not_be_merged_leaves_nothing(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    line = error("share", "merge", str(out), str(files[0]), str(tmp_path / "broken.db"))
    assert str(tmp_path / "broken.db") in line
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    out.touch()
    with pytest.raises(ShareError, match="is there already: name a new file"):
        share_databases.merge(out, files)
    assert "no database" in error("share", "merge", str(tmp_path / "n.db"), str(files[0]), "x.db")


def test_the_command_takes_databases(files: list[Path], tmp_path: Path) -> None:
    out = str(tmp_path / "out.db")
    found = answer("share", "merge", out, *map(str, files))
    assert found == {"file": out, "runs": 3, "measurements": 26}


# --- size ----------------------------------------------------------------------------------------

MEASURE = """
import resource, sys, time
from pathlib import Path
from mla_tuner import share_databases
out, *sources = map(Path, sys.argv[1:])
began = time.perf_counter()
found = share_databases.merge(out, sources)
wall, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
print(found["measurements"], round(wall, 1), round(time.process_time(), 1), used.ru_maxrss >> 10)
"""


def grow(path: Path, seeds: range) -> None:
    """A run a seed, each of 5,120 buckets with 18 losers, a baseline and a rival."""
    template = duel(SHAPE, SPLIT)
    with Store(path) as store:
        for seed in seeds:
            run = start(store, seed=seed)
            store.record(run, SHAPE.bucket, [template[1]] * 18, template)
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("PRAGMA table_info(measurement)").fetchall()
        columns = [f'"{row[1]}"' for row in found if row[1] != "id"]
        new = {'"context"': "c.value", '"batch"': "b.value", '"heads"': "h.value"}
        contexts, batches = [1024 << i for i in range(10)], [1, 2, 4, 8]
        connection.execute(
            f"INSERT INTO measurement ({', '.join(columns)}) "
            f"SELECT {', '.join(new.get(name, f'm.{name}') for name in columns)} "
            "FROM json_each(?) AS h, json_each(?) AS b, json_each(?) AS c, measurement AS m "
            "WHERE (c.value, b.value, h.value) != (32768, 1, 16)",
            [str([*range(1, 129)]), str(batches), str(contexts)],
        )
        connection.commit()


@pytest.mark.slow
def test_a_million_measurements_merge_in_little_memory(tmp_path: Path) -> None:
    """It prints rows, seconds by the clock and of the processor, and the peak in MB."""
    paths = [tmp_path / f"{name}.db" for name in ("out", "a", "b")]
    grow(paths[1], range(5))
    grow(paths[2], range(5, 10))
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout)
    rows, *_, peak = (float(word) for word in done.stdout.split())
    assert rows == 2 * 5 * 5120 * 20
    assert peak <= 500
    with Store(paths[0]) as store:
        assert len(store.plans()) == 5120
