"""Bad disks, clocks and locks: each is one line, and nothing is lost."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from fakes import FakeBackend, make_device
from test_store import SINGLE, SPLIT, duel, one_line, record, start
from winners import assert_one_line

from mla_tuner import store as stores
from mla_tuner.errors import StoreError
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX
from mla_tuner.policy import Policy
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.table import read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one winner."""
    with Store(tmp_path / "tuning.db") as store:
        record(store, start(store), 1024)
    return tmp_path / "tuning.db"


# --- locks and disks -----------------------------------------------------------------------------

NETWORK_ERRORS = ["locking protocol", "disk I/O error", "database is locked", "unable to open"]


class Failing(sqlite3.Connection):
    """Every statement from number `after` on fails, as on a network disk without locks."""

    after, seen, text = 0, 0, ""

    def execute(self, *args: object) -> sqlite3.Cursor:
        type(self).seen += 1
        if self.seen > self.after:
            raise sqlite3.OperationalError(self.text)
        return super().execute(*args)  # type: ignore[arg-type]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    class Connection(Failing):
        pass

    really = sqlite3.connect

    def connect(*args: object, **options: object) -> sqlite3.Connection:
        return really(*args, **options, factory=Connection)  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3, "connect", connect)
    return Connection


def tune_two(path: Path) -> None:
    with Store(path) as store:
        run = start(store)
        for context in (2048, 4096):
            record(store, run, context)


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("text", NETWORK_ERRORS)
def test_a_lock_or_disk_that_fails_is_one_line(
    text: str, after: int, path: Path, tmp_path: Path, failing: type[Failing]
) -> None:
    """At whatever statement it happens: to who opens, to who migrates, to who writes."""
    failing.after, failing.text = after, text
    for name in (path, tmp_path / "fresh.db"):
        failing.seen = 0
        with pytest.raises(StoreError) as error:
            tune_two(name)
        assert one_line(error) == f"cannot use the database {name}: {text}"
    failing.after = 10**9
    with Store(path) as store:
        assert store.check()["ok"]
        assert 1024 in {row.bucket.context for row in store.plans()}


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("text", NETWORK_ERRORS)
def test_serving_goes_on_without_a_lock(
    text: str, after: int, path: Path, failing: type[Failing], caplog: pytest.LogCaptureFixture
) -> None:
    failing.after, failing.text = after, text
    policy = Policy.load(path, make_device())
    assert len(policy) == 0
    assert_one_line(caplog, f"is not used ({text}): the gates decide")


FILL = """
import resource, signal, sys
sys.path[:0] = {paths!r}
from test_store import SINGLE, Measurement, Shape, Store, StoreError, duel, start
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Store(sys.argv[1]) as store:
    run = start(store)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for heads in range(1, 129):
            shape = Shape(2048, 1, heads)
            search = [Measurement(shape, SINGLE, samples_us=tuple(map(float, range(999))))]
            store.record(run, shape.bucket, search, duel(shape))
            print(heads, flush=True)
    except StoreError as error:
        print(error)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit for the size of files here")
def test_a_disk_that_fills_up_keeps_every_finished_bucket(path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    code = FILL.format(paths=[str(Path(__file__).parent)])
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *finished, last = done.stdout.splitlines()
    assert last.startswith(f"cannot use the database {path}: ")
    assert finished
    with Store(path) as store:  # there is room again
        assert store.check()["ok"]
        found = {row.bucket.heads for row in store.plans() if row.bucket.context == 2048}
        assert found == set(map(int, finished))
        record(store, start(store), 4096)


# --- the clock -----------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order is that of the runs: the duel that was stored last holds, whatever day it says."""
    days = iter(["2031-01-01", "2030-01-01", "1970-01-01"])
    shape = Shape(4096, 1, 16)
    with Store(path) as store:
        for plan in (SPLIT, SINGLE, SPLIT):
            day = datetime.fromisoformat(f"{next(days)}T00:00:00+00:00")
            monkeypatch.setattr(stores, "_now", day.isoformat)
            store.record(start(store), shape.bucket, [], duel(shape, plan))
            for _ in range(2):
                (row,) = [row for row in store.plans() if row.bucket == shape.bucket]
                assert row.plan == plan
                store.rebuild()
        assert row.day == "1970-01-01"
    assert read_rows(path, make_device())[-1] == row


def test_a_refuted_plan_stays_refuted_whatever_the_clock_says(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_now", lambda: "1970-01-01T00:00:00+00:00")
    shape = Shape(1024, 1, 16)
    lost = [
        Measurement(shape, MLX, rounds=6, median_us=9.0, ratio=1.0),
        Measurement(shape, SPLIT, "wrong", "row error 0.5", 0.5),
    ]
    with Store(path) as store:
        row = store.record(start(store), shape.bucket, (), lost, refutes=True)
        assert row is not None
        assert (row.plan, row.median_us, row.split_speedup) == (MLX, 9.0, None)
        assert store.refuted(make_device()) == store.plans() == [row]
        assert store.tuned(make_device(), "digest", "1.0") == []
        (reason,) = store._db.execute("SELECT reason FROM plan").fetchone()
        assert reason == "split x2 r16 did not hold: row error 0.5"
        store.rebuild()
        assert store.refuted(make_device()) == store.plans() == [row]
    policy = Policy(make_device(), read_rows(path, make_device()), backend=FakeBackend(), mlx="1.0")
    assert policy.decide(1024, 1, 16, "bfloat16").plan == MLX


def test_a_plan_is_refuted_even_where_mlx_has_no_time(path: Path) -> None:
    shape = Shape(1024, 1, 16)
    lost = [Measurement(shape, MLX, "timeout", "late"), Measurement(shape, SPLIT, "wrong", "bad")]
    with Store(path) as store:
        row = store.record(start(store), shape.bucket, (), lost, refutes=True)
        assert row is not None
        assert (row.plan, row.median_us) == (MLX, 0.0)
        assert store.check()["ok"]


# --- speed-ups -----------------------------------------------------------------------------------


def test_speedups_are_those_of_the_best_plan_of_each_path(path: Path) -> None:
    """From what was measured last of each plan; failures count for nothing."""
    shape = Shape(2048, 1, 16)
    wide = duel(shape)[1].plan

    def found(plan: object, ratio: float | None, status: str = "ok") -> Measurement:
        return Measurement(shape, plan, status, ratio=ratio)  # type: ignore[arg-type]

    search = [
        found(MLX, 1.0),
        found(SINGLE, 0.9),
        found(stores.Plan("single", 1, "r32"), 1.5),
        found(stores.Plan("single", 1, "r64"), None, "wrong"),
        found(stores.Plan("mlx_rows"), 7.0),
        found(wide, 200.0),  # a lucky one: the duel corrects it
        found(stores.Plan("split", 4, "r16"), 60.0),
    ]
    with Store(path) as store:
        run = start(store)
        row = store.record(run, shape.bucket, search, duel(shape))
        assert row is not None
        assert (row.single_speedup, row.split_speedup) == (1.5, 100.0)
        before = store.plans()
        store.rebuild()
        assert store.plans() == before
