"""Tables into a database and out again: pooled, kept apart from what was measured here, undone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import answer, error, run
from share_tables import (
    H200,
    KERNEL,
    SPLIT,
    WINNERS,
    any_kernel,
    duel,
    fill,
    start,
    table,
    table_of,
)

from mla_tuner import share
from mla_tuner.backends import get
from mla_tuner.errors import ShareError, StoreError
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.share_format import SharedTable
from mla_tuner.store import Store
from mla_tuner.table import read_imported, read_rows

__all__ = ["any_kernel", "table"]  # the fixtures
SHAPE = Shape(32768, 1, 16)
LESS = Plan("split", 32, "r16")


@pytest.fixture
def shared(tmp_path: Path) -> SharedTable:
    with fill(tmp_path / "theirs.db") as store:
        (table,) = share.tables(store)
    return table


@pytest.mark.usefixtures("any_kernel")
def test_what_goes_in_comes_out_the_same(shared: SharedTable, tmp_path: Path) -> None:
    run_id = shared.devices[0].runs[0].id
    with Store(tmp_path / "ours.db") as store:
        found = share.into_store(shared, store)
        assert found == {"runs": 1, "buckets": 3, "known": 0, "ids": [run_id]}
        (again,) = share.tables(store)
        assert share.render(again) == share.render(shared)
        assert {row.bucket: row.plan for row in store.plans()} == {
            shape.bucket: plan for shape, plan in WINNERS.items()
        }
        assert share.into_store(shared, store) == {"runs": 0, "buckets": 0, "known": 3, "ids": []}
        assert store.check()["ok"]


@pytest.mark.usefixtures("any_kernel")
def test_a_run_that_was_measured_here_is_known(shared: SharedTable, tmp_path: Path) -> None:
    with Store(tmp_path / "theirs.db") as store:
        assert share.into_store(shared, store)["known"] == 3
        assert len(store.plans()) == 3


@pytest.mark.usefixtures("any_kernel")
def test_imported_runs_pool_and_an_own_verdict_stays(tmp_path: Path) -> None:
    tables = [
        table_of(tmp_path / f"{i}.db", duel(SHAPE, SPLIT, ratio, 4), seed=i)
        for i, ratio in enumerate((2.0, 2.2))
    ]
    with Store(tmp_path / "ours.db") as store:
        for number, plan in enumerate((MLX, SPLIT)):  # four rounds alone have no interval
            share.into_store(tables[number], store)
            assert [row.plan for row in store.plans()] == [plan]
        before = store.plans(), store.thresholds(H200.key)
        store.rebuild()
        assert (store.plans(), store.thresholds(H200.key)) == before
        assert read_rows(store.path, H200) == []
        assert len(read_imported(store.path, H200.family, KERNEL)) == 1
        store.record(start(store), SHAPE.bucket, (), duel(SHAPE, LESS, 1.5))
        assert [row.plan for row in store.plans()] == [LESS]
        share.into_store(table_of(tmp_path / "c.db", duel(SHAPE, SPLIT, 9.0), seed=9), store)
        store.rebuild()
        assert [row.plan for row in read_rows(store.path, H200)] == [LESS]


@pytest.mark.usefixtures("any_kernel")
def test_an_import_is_taken_out_by_its_run(shared: SharedTable, tmp_path: Path) -> None:
    other = table_of(tmp_path / "b.db", duel(SHAPE, LESS, 4.0), seed=1)
    with Store(tmp_path / "ours.db") as store:
        share.into_store(shared, store)
        before = store.plans(), store.thresholds(H200.key), store.check()["rows"]
        (run_id,) = share.into_store(other, store)["ids"]
        assert LESS in [row.plan for row in store.plans()]
        assert share.undo(store, run_id) == 1
        assert (store.plans(), store.thresholds(H200.key), store.check()["rows"]) == before
        with pytest.raises(ShareError, match=f"no run {run_id} was imported into"):
            share.undo(store, run_id)
        share.undo(store, shared.devices[0].runs[0].id)
        assert set(store.check()["rows"].values()) == {0}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("any_kernel")
def test_taking_an_import_out_leaves_what_was_here_as_it_was(tmp_path: Path) -> None:
    """Thresholds, too: of a kind of which contexts were tuned here and others imported."""
    found = duel(Shape(8192, 1, 16), SPLIT), duel(SHAPE, SPLIT)
    theirs = table_of(tmp_path / "b.db", *found, seed=1)
    with Store(tmp_path / "ours.db") as store:
        store.record(start(store), SHAPE.bucket, (), duel(SHAPE, LESS))
        before = store.plans(), store.thresholds(H200.key), store.check()["rows"]
        (run_id,) = share.into_store(theirs, store)["ids"]
        assert store.thresholds(H200.key) != before[1]
        share.undo(store, run_id)
        assert (store.plans(), store.thresholds(H200.key), store.check()["rows"]) == before


def test_a_run_of_this_database_is_not_taken_out(tmp_path: Path) -> None:
    with fill(tmp_path / "t.db") as store:
        (table,) = share.tables(store)
        with pytest.raises(ShareError, match="no run"):
            share.undo(store, table.devices[0].runs[0].id)
        assert len(store.plans()) == 3


@pytest.mark.usefixtures("any_kernel")
def test_a_failure_changes_nothing(
    shared: SharedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise ValueError("no more")

    with Store(tmp_path / "ours.db") as store:
        monkeypatch.setattr("mla_tuner.share_store.derive", fails)
        with pytest.raises(StoreError, match="no more"):
            share.into_store(shared, store)
        assert set(store.check()["rows"].values()) == {0}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("any_kernel")
def test_failed_plans_and_unrivalled_baselines_go_in_and_out(tmp_path: Path) -> None:
    shape = Shape(8192, 1, 16)
    default, rival = duel(shape, SPLIT)
    rival = replace(rival, status="wrong", samples_us=(), message="off by 2", max_error=2.0)
    found = table_of(tmp_path / "a.db", [default, rival], duel(SHAPE, MLX))
    with Store(tmp_path / "ours.db") as store:
        share.into_store(found, store)
        (again,) = share.tables(store)
    assert share.render(again) == share.render(found)
    bad = again.devices[0].buckets[0].evidence[0]
    assert (bad.failed, bad.partitions, bad.max_error) == ("wrong", 40, 2.0)


@pytest.mark.usefixtures("any_kernel")
def test_a_bucket_of_several_runs_counts_once_as_its_winner_does(tmp_path: Path) -> None:
    other = Shape(8192, 1, 16)
    first = table_of(tmp_path / "a.db", duel(SHAPE, SPLIT), seed=1)
    both = share.merged(first, table_of(tmp_path / "b.db", duel(SHAPE, LESS), seed=2))
    more = table_of(tmp_path / "c.db", duel(SHAPE, SPLIT), duel(other, SPLIT), seed=3)
    with Store(tmp_path / "ours.db") as store:
        for table, counts in (
            (both, (2, 1, 0)),
            (both, (0, 0, 1)),
            (share.merged(both, more), (1, 2, 0)),  # a new result of the bucket that was known
            (more, (0, 0, 2)),
        ):
            found = share.into_store(table, store)
            assert (found["runs"], found["buckets"], found["known"]) == counts
        assert len(store.plans()) == 2
    shipped = share.read(Path(__file__).parent.parent / "tuning_db" / "nvidia-sm90.json")
    with Store(tmp_path / "new.db") as store:
        assert share.into_store(shipped, store)["buckets"] == len(store.plans())


# --- the commands --------------------------------------------------------------------------------


def test_only_the_kernel_of_here_is_imported(table: Path, tmp_path: Path) -> None:
    line = error("share", "import", str(table), "--db", str(tmp_path / "new.db"))
    assert line.startswith("nvidia-sm90.json: devices.0.kernel: cuda/sm_90/132c/140gb was measured")
    assert f"with kernel {KERNEL}, this is {get('cuda').digest()}: only the same" in line
    assert not (tmp_path / "new.db").exists() or not Store(tmp_path / "new.db").plans()


@pytest.mark.usefixtures("any_kernel")
def test_the_command_says_how_it_is_undone(table: Path, tmp_path: Path) -> None:
    db = ("--db", str(tmp_path / "new.db"))
    text = run("share", "import", str(table), *db).stdout
    assert "3 buckets added, 0 known already" in text
    (run_id,) = (word for word in text.split() if len(word) == 16)
    assert f"mla-tune share import --undo {run_id}" in text
    assert answer("share", "import", "--undo", run_id, *db) == {"run": run_id, "buckets": 3}
    assert "no run" in error("share", "import", "--undo", run_id, *db)
    assert "give a table to import, or --undo" in error("share", "import", *db, code=2)
    assert "no database" in error("share", "import", "--undo", "a", "--db", str(tmp_path / "none"))
