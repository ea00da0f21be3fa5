from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_device

from mla_tuner import store as stores
from mla_tuner.errors import StoreError
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.store import Store
from mla_tuner.table import SCHEMA_VERSION, read_rows

SPLIT = Plan("split", 2, "r16")
SINGLE = Plan("single", 1, "r16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


def start(store: Store, kernel: str = "digest", mlx: str = "1.0") -> int:
    return store.start_run(
        make_device(), kernel=kernel, software={"mlx": mlx}, conditions={"load_1m": 0.5}
    )


def duel(shape: Shape, plan: Plan = SPLIT, low: float = 95.0) -> list[Measurement]:
    samples = (9000.123456, 9001.0)
    return [
        Measurement(shape, MLX, rounds=6, median_us=9000.0, ratio=1.0, samples_us=samples),
        Measurement(
            *(shape, plan, "ok", "", 1e-3, 6, 90.0, 89.0, 92.0, low + 5, low, low + 10),
            *((90.0, 91.0), plan),
        ),
    ]


def record(store: Store, run: int, context: int = 4096, **options: object) -> Bucket:
    shape = Shape(context, 1, 16)
    search = [Measurement(shape, SINGLE, "wrong", "row error 0.5", 0.5)]
    store.record(run, shape.bucket, search, duel(shape, **options))  # type: ignore[arg-type]
    return shape.bucket


def test_a_winner_is_stored_with_its_evidence(path: Path) -> None:
    with Store(path) as store:
        bucket = record(store, start(store))
        (row,) = store.plans()
        assert (row.bucket, row.plan, row.median_us) == (bucket, SPLIT, 90.0)
        assert (row.speedup, row.speedup_low, row.speedup_high) == (100.0, 95.0, 105.0)
        assert (row.kernel, row.mlx) == ("digest", "1.0")
        evidence = store.evidence(bucket)
        assert [(e["stage"], e["path"], e["status"]) for e in evidence] == [
            ("search", "single", "wrong"),
            ("duel", "mlx", "ok"),
            ("duel", "split", "ok"),
        ]
        assert evidence[0]["message"] == "row error 0.5"
        assert evidence[1]["samples_us"] == "[9000.1,9001.0]"
        assert evidence[2]["executed"] == "split x2 r16"
        assert evidence[2]["device"] == make_device().key
        assert store.evidence(Shape(1024, 1, 16).bucket) == []
    assert read_rows(path, make_device()) == [row]


def test_mlx_is_stored_where_nothing_beats_it(path: Path) -> None:
    with Store(path) as store:
        record(store, start(store), low=1.01)
        (row,) = store.plans()
        assert (row.plan, row.speedup, row.speedup_low) == (MLX, 1.0, None)


def test_evidence_without_a_duel_makes_no_winner(path: Path) -> None:
    shape = Shape(4096, 1, 16)
    with Store(path) as store:
        run = start(store)
        assert (
            store.record(run, shape.bucket, [Measurement(shape, MLX, "error", "no memory")]) is None
        )
        assert store.plans() == []
        assert [e["stage"] for e in store.evidence()] == ["cut"]
        assert store.rebuild() == 0


def test_a_duel_that_was_cut_short_changes_no_winner(path: Path) -> None:
    with Store(path) as store:
        run = start(store)
        bucket = record(store, run)
        short = [replace(m, ratio_low=None, ratio_high=None) for m in duel(bucket.shape, SINGLE)]
        assert store.record(run, bucket, [], short) is None
        assert [row.plan for row in store.plans()] == [SPLIT]
        assert [e["stage"] for e in store.evidence()][-2:] == ["cut", "cut"]
        assert store.rebuild() == 1
        assert [row.plan for row in store.plans()] == [SPLIT]


def thresholds(store: Store) -> list[dict[str, object]]:
    return list(store._db.query("SELECT * FROM threshold ORDER BY kernel, mlx"))


def test_thresholds_follow_the_winners(path: Path) -> None:
    with Store(path) as store:
        run = start(store)
        for context, plan in ((1024, SINGLE), (2048, SPLIT), (4096, SPLIT)):
            record(store, run, context, plan=plan)
        (found,) = thresholds(store)
        assert found["device"] == make_device().key
        family = Shape(1024, 1, 16).bucket._replace(context=0)
        assert {name: found[name] for name in Bucket._fields} == family._asdict()
        assert (found["native_from"], found["split_from"]) == (1024, 2048)
        assert found["kappa"] is not None


def test_everything_derived_can_be_rebuilt(path: Path) -> None:
    with Store(path) as store:
        first = start(store)
        record(store, first, 1024)
        record(store, first, 2048)
        record(store, start(store, mlx="2.0"), 1024, plan=SINGLE)
        second = start(store)
        record(store, second, 2048, low=1.0)
        before = store.plans(), thresholds(store)
        assert len(before[0]) == 3
        store._db.execute("DELETE FROM plan")
        store._db.execute("UPDATE threshold SET native_from = 7")
        assert store.rebuild() == 3
        assert (store.plans(), thresholds(store)) == before
        assert store.check()["ok"]


def test_each_mlx_and_kernel_keeps_its_winner(path: Path) -> None:
    with Store(path) as store:
        bucket = record(store, start(store))
        record(store, start(store, mlx="2.0"), plan=SINGLE)
        for mlx, plan in (("1.0", SPLIT), ("2.0", SINGLE)):
            (row,) = store.tuned(make_device(), "digest", mlx)
            assert (row.bucket, row.plan) == (bucket, plan)
        assert store.tuned(make_device(), "other", "1.0") == []
        assert store.tuned(make_device(64), "digest", "1.0") == []


def test_check_counts_rows(path: Path) -> None:
    with Store(path) as store:
        record(store, start(store))
        assert store.check() == {
            "path": str(path),
            "ok": True,
            "problems": [],
            "schema": SCHEMA_VERSION,
            "rows": {"device": 1, "run": 1, "measurement": 3, "plan": 1, "threshold": 1},
        }
        store._db.execute("DELETE FROM run")
        found = store.check()
        assert not found["ok"]
        assert "refers to a missing run" in str(found["problems"])


def test_a_new_folder_is_private_and_the_file_is_wal(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "mla-tuner"
    with Store(folder / "t.db") as store:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert store._db.journal_mode == "wal"


def test_opening_again_changes_nothing(path: Path) -> None:
    with Store(path) as store:
        record(store, start(store))
    with Store(path) as store:
        assert len(store.plans()) == 1


# --- faults --------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_newer_file_is_not_touched(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError) as error:
        Store(path)
    assert f"has schema {SCHEMA_VERSION + 1}" in one_line(error)


@pytest.mark.parametrize("content", [b"nonsense" * 1000, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_corrupt_file_is_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError) as error:
        Store(path)
    assert "cannot use the database" in one_line(error)
    assert path.read_bytes() == content


def test_damage_is_found(path: Path) -> None:
    with Store(path) as store:
        run = start(store)
        for context in (1024, 2048, 4096, 8192):
            record(store, run, context)
    data = bytearray(path.read_bytes())
    data[5 * 4096 :] = b"\x07" * (len(data) - 5 * 4096)
    path.write_bytes(data)
    assert "malformed" in damage(path)


def damage(path: Path) -> str:
    try:
        with Store(path) as store:
            return str(store.check()["problems"])
    except StoreError as error:
        return str(error)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError) as error:
        Store(tmp_path / "file" / "t.db")
    assert "cannot use the database" in one_line(error)


def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as error:
        Store(tmp_path)
    assert one_line(error).endswith("it is a folder")


def test_only_a_file_is_a_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target.db")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/null"), "a device")):
        for create in (True, False):
            with pytest.raises(StoreError) as error:
                Store(path, create=create)
            assert one_line(error).endswith(f"it is {kind}")
    Store(tmp_path / "link").close()
    assert (tmp_path / "target.db").is_file()


@pytest.mark.parametrize("create", [True, False])
def test_a_path_that_nobody_may_look_at_is_refused(
    create: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError) as error:
        Store(tmp_path / ("x" * 4000), create=create)
    assert one_line(error).endswith("File name too long")

    def denied(path: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(StoreError) as error:
        Store(tmp_path / "t.db", create=create)
    assert one_line(error).endswith("t.db: Permission denied")


def foreign(path: Path, version: int) -> bytes:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmark (url TEXT)")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("version", [-1, 0, SCHEMA_VERSION, SCHEMA_VERSION + 1])
def test_a_database_of_another_program_is_not_touched(
    create: bool, version: int, path: Path
) -> None:
    before = foreign(path, version)
    with pytest.raises(StoreError) as error:
        Store(path, create=create)
    assert "name another file with --db" in one_line(error)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_opening_what_is_there_makes_nothing(path: Path) -> None:
    with pytest.raises(StoreError) as error:
        Store(path, create=False)
    assert one_line(error) == f"no database at {path}: run mla-tune"
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreError) as error:
        Store(path, create=False)
    assert one_line(error) == f"{path} holds no tuning data: run mla-tune"
    assert path.read_bytes() == b""
    with Store(path) as store:  # an empty file is ours to fill
        record(store, start(store))
    with Store(path, create=False) as store:
        assert store.rebuild() == 1
        assert store.check()["ok"]


def test_a_file_in_a_read_only_folder_can_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(path) as store:
        record(store, start(store))
    before = path.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for create in (True, False):
        with Store(path, create=create) as store:
            assert store.check()["ok"]
            assert len(store.plans()) == 1
            with pytest.raises(StoreError) as error:
                start(store)
            assert "readonly" in one_line(error)
    assert path.read_bytes() == before


def test_a_full_disk_is_one_line_and_keeps_what_was_there(path: Path) -> None:
    with Store(path) as store:
        run = start(store)
        record(store, run, 1024)
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then says: disk is full
        shape = Shape(2048, 1, 16)
        big = [
            Measurement(shape, SINGLE, median_us=1.0, samples_us=tuple(map(float, range(9999))))
        ] * 9
        with pytest.raises(StoreError) as error:
            store.record(run, shape.bucket, big, duel(shape))
        assert "full" in one_line(error)
        assert len(store.plans()) == 1
        assert store.evidence(shape.bucket) == []


def test_a_lock_that_stays_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).close()
    monkeypatch.setattr(stores, "LOCK_WAIT_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with Store(path) as store, pytest.raises(StoreError) as error:
            start(store)
    finally:
        holder.close()
    assert "locked" in one_line(error)


def test_a_read_only_file_can_be_read_and_says_so_when_written(path: Path) -> None:
    with Store(path) as store:
        record(store, start(store))
        store._db.execute("PRAGMA query_only = 1")  # file permissions don't stop root
        with pytest.raises(StoreError) as error:
            record(store, 1, 2048)
        assert "readonly" in one_line(error)
        assert store.check()["ok"]
        assert len(store.plans()) == 1


def test_a_failure_in_a_transaction_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with Store(path) as store:
        run = start(store)
        monkeypatch.setattr(store, "_derive_threshold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(store, run)
        assert store.plans() == store.evidence() == []


# --- many processes ------------------------------------------------------------------------------

SPAWN = multiprocessing.get_context("spawn")  # a fork would copy MLX's threads half alive


def _tune_and_read(path: str, number: int) -> None:
    with Store(path) as store:
        run = start(store)
        for context in (1024, 2048, 4096):
            shape = Shape(context, 1, number + 1)
            store.record(run, shape.bucket, [], duel(shape))
            assert read_rows(Path(path), make_device())


def test_eight_processes_share_a_fresh_file(path: Path) -> None:
    workers = [SPAWN.Process(target=_tune_and_read, args=(str(path), i)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    with Store(path) as store:
        assert len(store.plans()) == 24
        assert store.check()["ok"]


@pytest.mark.parametrize("statement", [1, 2, 3, 4])
def test_the_tables_may_appear_while_the_file_is_opened(
    statement: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes them, all at once, before any statement of this one."""
    really, seen = stores.Database.execute, []

    def execute(db: stores.Database, sql: str, *values: object) -> object:
        seen.append(sql)
        if len(seen) == statement:
            Store(path).close()
        return really(db, sql, *values)

    monkeypatch.setattr(stores.Database, "execute", execute)
    with Store(path) as store:
        assert len(seen) > statement
        assert store.check()["ok"]


def _record_for_ever(path: str) -> None:
    with Store(path) as store:
        run = start(store)
        for heads in range(1, 129):
            shape = Shape(1024, 1, heads)
            store.record(run, shape.bucket, duel(shape), duel(shape))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_the_bucket_in_flight_only(path: Path) -> None:
    Store(path).close()
    worker = SPAWN.Process(target=_record_for_ever, args=(str(path),))
    worker.start()
    while not read_rows(path, make_device()):
        time.sleep(0.001)
    worker.kill()
    worker.join()
    with Store(path) as store:
        assert store.check()["ok"]
        plans = store.plans()
        assert plans
        evidence = store.evidence()
        assert len(evidence) == 4 * len(plans)
        assert store.rebuild() == len(plans)
