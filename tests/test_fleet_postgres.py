"""A fleet on a real PostgreSQL: machines die, the server restarts, passwords stay secret."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from commands import TUNE, answer, error
from fakes import FakeBackend, FakeRunner, FakeRunners, make_device
from postgres import PASSWORD, QUOTED, Server, programs, server

from mla_tuner import fleet, fleet_study
from mla_tuner.device import MLX_VERSION, system_version
from mla_tuner.errors import FleetError
from mla_tuner.fleet_study import FleetStudy
from mla_tuner.plan import MLX
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.tuner import Summary, default_buckets

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: mla-tuner[fleet]")
pytestmark = pytest.mark.skipif(not programs(), reason="PostgreSQL's initdb is not installed")

MACHINE = Path(__file__).with_name("fleet_machine.py")
LIKE = (make_device(4).key, "kernel digest", f"MLX {MLX_VERSION}", system_version() or "no system")
names = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture
def url(postgres: Server) -> str:
    """A new database on a running server."""
    name = f"fleet{next(names)}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return postgres.url.replace("/postgres", f"/{name}")


class Machine:
    """`fleet_machine.py` as a process with a folder of its own."""

    def __init__(self, folder: Path, url: str, seconds: float, count: int) -> None:
        folder.mkdir()
        self.folder, self.db = folder, folder / "tuning.db"
        command = [sys.executable, MACHINE, folder, url, seconds, count]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def busy(self) -> list[int]:
        """Buckets that it tuned before, and the heads of the one it is at; [] between buckets."""
        with suppress(FileNotFoundError):
            return [int(word) for word in (self.folder / "busy").read_text().split()]
        return []

    def answer(self) -> dict[str, object]:
        """What it says at its end."""
        out, err = self.process.communicate()
        assert (self.process.returncode, err) == (0, ""), out + err
        return json.loads((self.folder / "answer.json").read_text())

    def winners(self) -> dict[object, object]:
        with Store(self.db, create=False) as store:
            return {row.bucket: row for row in store.plans()}

    def runs(self) -> dict[object, set[int]]:
        """Runs with evidence, by bucket."""
        with Store(self.db, create=False) as store:
            found: dict[object, set[int]] = {}
            for row in store.evidence():
                bucket = tuple(row[name] for name in ("context", "heads", "dtype"))
                found.setdefault(bucket, set()).add(row["run"])
            return found


def tuned_in(url: str) -> list[tuple[str, ...]]:
    """Buckets of the finished attempts."""
    with FleetStudy(url, LIKE) as study:
        return [each.bucket for each in study.attempts() if each.state == "done"]


Start = Callable[[int, str, float, int], list[Machine]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts so many machines, which begin together; none outlives the test."""
    started: list[Machine] = []

    def begin(count: int, url: str, seconds: float, buckets: int) -> list[Machine]:
        folder = tmp_path / f"machines{len(started)}"
        folder.mkdir()
        machines = [Machine(folder / str(each), url, seconds, buckets) for each in range(count)]
        started.extend(machines)
        for machine in machines:
            machine.until((machine.folder / "ready").exists)
        (folder / "go").touch()
        return machines

    yield begin
    for machine in started:
        machine.process.kill()
        machine.process.communicate()


def kill(machine: Machine, after: int = 0) -> int:
    """In the middle of a bucket, when so many were tuned; the heads of that bucket."""
    machine.until(lambda: machine.busy()[:1] > [after - 1])
    machine.process.send_signal(signal.SIGKILL)
    machine.process.communicate()
    return machine.busy()[1]


def check(machines: list[Machine], url: str, count: int) -> list[dict[str, object]]:
    """Every bucket was tuned once, and all machines have all of them."""
    answers = [machine.answer() for machine in machines]
    assert all(answer["not_reached"] == [] for answer in answers)
    done = tuned_in(url)
    assert len(done) == len(set(done)) == count
    tables = [machine.winners() for machine in machines]
    assert [len(table) for table in tables] == [count] * len(machines)
    for table in tables[1:]:
        assert {b: row.plan for b, row in table.items()} == {
            b: row.plan for b, row in tables[0].items()
        }
    for machine in machines:
        assert all(len(runs) == 1 for runs in machine.runs().values())
    return answers


def test_a_machine_that_is_killed_gives_its_bucket_back(start: Start, url: str) -> None:
    machines = start(3, url, 0.5, 9)
    lost = kill(machines[0])
    answers = check(machines[1:], url, 9)
    tuned = [tuple(bucket) for answer in answers for bucket in answer["tuned"]]
    assert len(tuned) == len(set(tuned))
    assert lost in {bucket[2] for bucket in tuned}
    assert all(answer["tuned"] for answer in answers)


# --- in this process -----------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Store, FakeRunners]]:
    """A simulated machine with short waits, in this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fleet.backends, "get", lambda name: FakeBackend())
    for module, name in ((fleet, "POLL_S"), (fleet_study, "RETRY_S")):
        monkeypatch.setattr(module, name, 0.01)
    runners = FakeRunners(lambda shape, plan: 9e-3 if plan == MLX else 1e-3 / plan.partitions)
    with Store(tmp_path / "tuning.db") as store:
        yield store, runners


def tune(url: str, store: Store, runners: FakeRunners) -> Summary:
    grid = default_buckets([1024], [1], range(1, 5), ["bfloat16"])
    return fleet.tune(
        *(url, store, make_device(4), grid), budget_s=1e9, note=print, runners=runners
    )


def at_the_second_bucket(runners: FakeRunners, action: Callable[[], None]) -> None:
    fresh = runners.fresh

    def acted(shape: Shape, seed: int) -> AbstractContextManager[FakeRunner]:
        if len(runners.duels) == 1:
            action()
        return fresh(shape, seed)

    runners.fresh = acted  # type: ignore[method-assign]


def test_a_run_goes_on_while_the_server_restarts(
    postgres: Server, url: str, machine: tuple[Store, FakeRunners]
) -> None:
    store, runners = machine
    back = threading.Thread(target=postgres.start)

    def restart() -> None:
        postgres.stop()
        back.start()  # the bucket ends before it is there

    at_the_second_bucket(runners, restart)
    summary = tune(url, store, runners)
    back.join()
    assert (len(summary.tuned), summary.not_reached) == (4, [])
    assert len(tuned_in(url)) == 4


def test_a_server_that_stays_away_ends_the_run_and_the_next_goes_on(
    postgres: Server,
    url: str,
    machine: tuple[Store, FakeRunners],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, runners = machine
    monkeypatch.setattr(fleet_study, "PATIENCE_S", 0.05)
    at_the_second_bucket(runners, postgres.stop)
    try:
        with pytest.raises(FleetError) as lost:
            tune(url, store, runners)
    finally:
        postgres.start()
    text = str(lost.value)
    assert text.startswith(f"lost the storage 127.0.0.1:{postgres.port}/")
    assert "Connection refused" in text
    assert text.endswith("; tuned buckets are stored here, the same command goes on")
    assert "\n" not in text
    assert len(store.plans()) == 2
    assert len(tuned_in(url)) == 1
    silence(url)  # of the attempt that could not be ended
    summary = tune(url, store, runners)
    assert (len(summary.tuned), len(summary.skipped_known)) == (2, 2)
    done = tuned_in(url)
    assert len(done) == len(set(done)) == 4


def silence(url: str) -> None:
    """As if no machine had sent a heartbeat for a long time."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = '2001-01-01'")


def test_a_heartbeat_is_sent_while_a_bucket_is_tuned(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = threading.Semaphore(0)
    beat = fleet_study.RDBStorage.record_heartbeat

    def counted(self: fleet_study.RDBStorage, attempt: int) -> None:
        beat(self, attempt)
        beats.release()

    monkeypatch.setattr(fleet_study, "HEARTBEAT_S", 1)
    with FleetStudy(url, LIKE) as study:
        attempt = study.claim(default_buckets([1024], [1], [16], ["bfloat16"])[0])
        assert attempt is not None
        monkeypatch.setattr(fleet_study.RDBStorage, "record_heartbeat", counted)
        monkeypatch.setattr(fleet_study, "HEARTBEAT_S", 0.01)
        with study.beating(attempt):
            silence(url)
            beats.acquire()
            beats.acquire()  # at least one began after the silence
        assert [each.state for each in study.attempts()] == ["running"]


def test_of_many_machines_that_begin_at_once_one_gets_a_bucket(url: str) -> None:
    """Each makes the tables where there are none, and wants the same bucket."""
    (bucket,) = default_buckets([1024], [1], [16], ["bfloat16"])

    def join(number: int) -> bool:
        with FleetStudy(url, LIKE) as study:
            return study.claim(bucket) is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(join, range(8))) == 1


def test_a_wrong_password_is_one_line(
    fake: FakeRunners, postgres: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = error("--storage", url.replace(QUOTED, "wr0ng%7Bx%7D"), *TUNE)
    assert text.startswith(f"cannot use the storage 127.0.0.1:{postgres.port}/fleet")
    assert 'password authentication failed for user "tuner"' in text
    assert "wr0ng" not in text
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    answer("--storage", url.replace(f":{QUOTED}", ""), *TUNE)


def test_a_missing_database_is_one_line(fake: FakeRunners, url: str) -> None:
    text = error("--storage", f"{url}x", *TUNE)
    assert "does not exist" in text
    assert QUOTED not in text
    assert PASSWORD not in text


# --- the number ----------------------------------------------------------------------------------


def seconds(answers: list[dict[str, float]]) -> float:
    """From the first machine's start to the last one's end."""
    return max(each["ended"] for each in answers) - min(each["started"] for each in answers)


@pytest.mark.slow
def test_three_machines_of_which_one_is_killed_are_fast(
    start: Start, tmp_path: Path, url: str
) -> None:
    """Beside one machine that tunes the same alone, at the same time on the same cores."""
    (one,) = start(1, f"sqlite:///{tmp_path}/alone.db", 4.0, 36)
    machines = start(3, url, 4.0, 36)
    kill(machines[0], after=10)  # of about twelve
    together = seconds(check(machines[1:], url, 36))
    alone = seconds([one.answer()])
    print(f"one machine {alone:.1f} s, three of which one is killed {together:.1f} s")
    assert together <= 0.45 * alone
