"""How machines of a fleet split buckets, on SQLite: who tunes which, and what is kept of it."""

from __future__ import annotations

import copy
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from fakes import FakeBackend, FakeRunners, make_device

from mla_tuner import fleet, fleet_study, share_store, tuner
from mla_tuner.device import MLX_VERSION
from mla_tuner.errors import BudgetError, DeviceError, FleetError
from mla_tuner.fleet_study import FleetStudy
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.store import Store
from mla_tuner.tuner import Summary, default_buckets

DEVICE = make_device(4)
LIKE = (DEVICE.key, "kernel digest", f"MLX {MLX_VERSION}", "Test OS 1")
GRID = default_buckets([1024, 2048], [1], [16, 32], ["bfloat16"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fleet.db"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a back end of its own, and no waits."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(tuner.backends, "get", lambda name: FakeBackend())
    monkeypatch.setattr(tuner.devices, "software", software)
    for module, name in ((fleet, "POLL_S"), (fleet_study, "RETRY_S")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(fleet_study, "PATIENCE_S", 0.05)


def software(system: str = "Test OS 1") -> dict[str, str]:
    return {"mla_tuner": "0", "mlx": MLX_VERSION, "os": "Test", "system": system}


@pytest.fixture
def study(url: str) -> Iterator[FleetStudy]:
    with FleetStudy(url, LIKE) as study:
        yield study


class Machine:
    """One machine: its database, its notes, what it measured."""

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, list[str]()
        self.runners = FakeRunners(lambda s, plan: 9e-3 if plan == MLX else 1e-3 / plan.partitions)

    def tune(self, url: str, buckets: list[Bucket] = GRID, budget_s: float = 1e6) -> Summary:
        with Store(self.path) as store:
            return fleet.tune(
                *(url, store, DEVICE, buckets),
                budget_s=budget_s,
                note=self.notes.append,
                runners=self.runners,
            )

    def tune_alone(self, buckets: list[Bucket]) -> None:
        with Store(self.path) as store:
            tuner.tune(store, DEVICE, buckets, budget_s=1e6, runners=self.runners)

    def evidence(self) -> list[dict[str, Any]]:
        with Store(self.path) as store:
            return store.evidence()

    def winners(self) -> dict[Bucket, tuple[Plan, float]]:
        with Store(self.path) as store:
            return {row.bucket: (row.plan, row.speedup) for row in store.plans()}


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one.db")


@pytest.fixture
def two(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "two.db")


def states(study: FleetStudy) -> list[tuple[Bucket, str]]:
    return [(each.bucket, each.state) for each in study.attempts()]


def silence(study: FleetStudy) -> None:
    """As if no machine had sent a heartbeat for a long time."""
    with study.storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = '2001-01-01'"))


# --- splitting -----------------------------------------------------------------------------------


def test_a_second_machine_measures_nothing_twice_and_has_all(
    url: str, one: Machine, two: Machine
) -> None:
    one.tune(url, GRID[:3])
    summary = two.tune(url)
    assert [row.bucket for row in summary.tuned] == GRID[3:]
    assert summary.skipped_known == GRID[:3]
    assert summary.not_reached == []
    assert two.notes == ["Tuned by other machines, and fetched: 3."]
    again = one.tune(url)
    assert (again.tuned, again.skipped_known) == ([], GRID)
    assert one.winners() == two.winners()
    assert set(one.winners()) == set(GRID)


def test_evidence_stays_within_the_machine_that_measured_it(
    url: str, one: Machine, two: Machine
) -> None:
    one.tune(url, GRID[:2])
    two.tune(url)
    kept = ("stage", "path", "partitions", "tile", "status", "ratio", "samples_us", "executed")
    kept = (*Bucket._fields, *kept, "rounds", "kernel", "mlx", "system", "device", "max_error")

    def of(machine: Machine, buckets: list[Bucket]) -> list[tuple[object, ...]]:
        rows = machine.evidence()
        shown = [tuple(row[name] for name in kept) for row in rows]
        return [row for row in shown if Bucket(*row[:8]) in buckets]

    assert of(one, GRID[:2]) == of(two, GRID[:2])
    assert len({row["run"] for row in two.evidence()}) == 2
    with Store(two.path) as store:
        before = store.plans()
        store.rebuild()
        assert store.plans() == before
        (fetched, own) = store.runs()[DEVICE]
        assert ("nonce" in fetched["conditions"], "nonce" in own["conditions"]) == (True, False)


def test_what_was_tuned_before_is_given_to_the_others(url: str, one: Machine, two: Machine) -> None:
    one.tune_alone(GRID)
    made = len(one.runners.made)
    one.tune(url)
    assert len(one.runners.made) == made
    assert two.tune(url).tuned == []
    assert two.winners() == one.winners()


def test_a_running_bucket_is_waited_for(
    url: str, study: FleetStudy, one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = study.claim(GRID[0])
    assert attempt is not None
    monkeypatch.setattr(fleet.time, "sleep", lambda seconds: study.give_back(attempt))
    summary = one.tune(url)
    assert {row.bucket for row in summary.tuned} == set(GRID)
    assert one.notes[0].startswith("Nothing is left to take: waiting for ")


def test_what_others_are_at_when_the_budget_ends_is_said(
    url: str, study: FleetStudy, one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.claim(GRID[0])

    def late(seconds: float) -> None:
        assert one.runners.last
        one.runners.last.clock += 1e9

    monkeypatch.setattr(fleet.time, "sleep", late)
    summary = one.tune(url)
    assert len(summary.tuned) == len(GRID) - 1
    assert summary.not_reached == [(GRID[0], f"{platform.node()} is at it")]


def test_a_missed_heartbeat_ends_nothing(
    study: FleetStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = threading.Semaphore(0)

    def lost(*args: object) -> None:
        missed.release()
        raise optuna.exceptions.StorageInternalError("away")

    attempt = study.claim(GRID[0])
    assert attempt is not None
    monkeypatch.setattr(fleet_study, "HEARTBEAT_S", 0.01)
    with monkeypatch.context() as patches:
        patches.setattr(fleet_study.RDBStorage, "record_heartbeat", lost)
        with study.beating(attempt):
            missed.acquire()
            missed.acquire()  # the next one was tried, too
    assert states(study) == [(GRID[0], "running")]


def test_shared_tables_count_what_was_fetched_once(url: str, one: Machine, two: Machine) -> None:
    """Pooling what two machines of a fleet share gives what each of them has."""
    one.tune(url, GRID[:2])
    two.tune(url)
    one.tune(url)
    shown = []
    for machine in (one, two):
        with Store(machine.path) as store:
            shown.append(share_store.tables(store))
    assert shown[0] == shown[1]
    assert len(shown[0][0].devices[0].runs) == 2


# --- machines that stop --------------------------------------------------------------------------


def test_a_silent_machine_loses_its_bucket(url: str, study: FleetStudy, one: Machine) -> None:
    lost = study.claim(GRID[0])
    assert lost is not None
    study.attempts()
    silence(study)
    one.tune(url)
    assert set(one.winners()) == set(GRID)
    assert states(study) == [(GRID[0], "dead"), *((bucket, "done") for bucket in GRID)]
    assert not study.finish(lost, 2.0, {})  # it lives, but was given up


def test_a_machine_that_died_before_its_first_heartbeat_is_noticed(
    url: str, study: FleetStudy, one: Machine
) -> None:
    attributes = {"bucket": list(GRID[0]), "machine": "m"}
    running = optuna.trial.TrialState.RUNNING
    trial = optuna.trial.create_trial(state=running, user_attrs=attributes)
    study.storage.create_new_trial(study.id, trial)
    assert states(study) == [(GRID[0], "running")]
    silence(study)
    one.tune(url)
    assert set(one.winners()) == set(GRID)


def test_a_bucket_that_kills_machines_is_given_up(
    url: str, one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FleetStudy(url, LIKE) as others:
        claim = FleetStudy.claim

        def too_late(self: FleetStudy, bucket: Bucket) -> int | None:
            """Another machine takes this bucket first, and is never heard of again."""
            if bucket != GRID[0]:
                return claim(self, bucket)
            claim(others, bucket)
            silence(others)
            return None

        monkeypatch.setattr(FleetStudy, "claim", too_late)
        summary = one.tune(url)
    assert len(summary.tuned) == len(GRID) - 1
    assert summary.not_reached == [(GRID[0], "3 machines died at it")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError, OSError])
def test_whoever_stops_gives_its_bucket_back(
    url: str, study: FleetStudy, one: Machine, two: Machine, error: type[BaseException]
) -> None:
    fresh = one.runners.fresh

    def broken(shape: Shape, seed: int) -> Any:
        if one.runners.duels:
            raise error("stop")
        return fresh(shape, seed)

    one.runners.fresh = broken  # type: ignore[method-assign]
    with pytest.raises(error):
        one.tune(url)
    assert states(study) == [(GRID[0], "done")]
    assert [row.bucket for row in two.tune(url).tuned] == GRID[1:]


def test_what_does_not_fit_the_budget_is_left_to_others(
    url: str, study: FleetStudy, one: Machine, two: Machine
) -> None:
    one.runners.seconds = lambda shape, plan: 100.0
    with pytest.raises(BudgetError):
        one.tune(url, budget_s=1.0)
    assert states(study) == []
    assert {row.bucket for row in two.tune(url).tuned} == set(GRID)


def test_a_bucket_that_cannot_be_measured_is_tried_once_a_run(
    url: str, one: Machine, two: Machine
) -> None:
    for machine in (one, two):
        machine.runners.options["check_result"] = lambda plan: Checked(False, 1.0, "off", 1e-4)
    assert [bucket for bucket, _ in one.tune(url, GRID[:1]).failed] == GRID[:1]
    summary = two.tune(url, GRID[:1])  # it joined later
    assert [bucket for bucket, _ in summary.failed] == GRID[:1]
    assert len(two.runners.made) > 0


def test_a_bucket_that_failed_elsewhere_is_not_tried_in_the_same_run(
    url: str, study: FleetStudy, one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = FleetStudy.claim

    def too_late(self: FleetStudy, bucket: Bucket) -> int | None:
        if bucket != GRID[0]:
            return claim(self, bucket)
        attempt = claim(study, bucket)
        assert attempt is not None
        study.fail(attempt, "no memory")
        return None

    monkeypatch.setattr(FleetStudy, "claim", too_late)
    summary = one.tune(url)
    assert len(summary.tuned) == len(GRID) - 1
    ((bucket, reason),) = summary.not_reached
    assert bucket == GRID[0]
    assert reason.startswith("failed on ")
    assert reason.endswith(": no memory")


# --- results of others ---------------------------------------------------------------------------


def test_a_plan_that_did_not_hold_here_is_not_fetched_again(
    url: str, one: Machine, two: Machine
) -> None:
    one.tune(url, GRID[:1])
    two.tune(url, GRID[:1])
    with Store(two.path) as store:
        (row,) = store.plans()
        run = store.start_run(DEVICE, kernel="digest", software=software())
        slow = [m for m in map(fleet.measurement_of, store.evidence()) if m.plan in (MLX, row.plan)]
        store.record(run, GRID[0], (), slow[:2], refutes=True)
    summary = two.tune(url, GRID[:1])
    assert summary.tuned == []
    ((_, reason),) = summary.not_reached
    assert "it did not hold here; without --storage it is tuned here" in reason


def change(*path: str | int, to: object) -> Callable[[dict[str, Any]], object]:
    """The same result with another value at a path."""

    def changed(result: dict[str, Any]) -> object:
        found: Any = result
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to
        return result

    return changed


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda result: None,
    "a list": lambda result: [1, 2],
    "no evidence": change("evidence", to=[]),
    "evidence of numbers": change("evidence", to=[1, 2]),
    "software of text": change("software", to="mlx"),
    "options of numbers": change("options", to=3),
    "conditions of text": change("conditions", to="hot"),
    "an illegal plan": change("evidence", -1, "partitions", to=10**9),
    "an unknown path": change("evidence", -1, "path", to="'; DROP TABLE plan; --"),
    "a time of text": change("evidence", -1, "median_us", to="fast"),
    "a negative time": change("evidence", -1, "median_us", to=-1.0),
    "samples of text": change("evidence", -1, "samples_us", to="[x"),
    "an endless ratio": change("evidence", -1, "ratio", to=float("inf")),
    "half an interval": change("evidence", -1, "ratio_low", to=None),
    "no run": change("nonce", to=""),
    "a day that was not": change("at", to="yesterday"),
    "an odd executed plan": change("evidence", -1, "executed", to="'; --"),
    "a tile with a newline": change("evidence", -1, "tile", to="r16\n"),
    "only the search": lambda result: (
        result | {"evidence": [row for row in result["evidence"] if row["stage"] == "search"]}
    ),
}


def test_malformed_results_are_not_used(
    url: str, study: FleetStudy, one: Machine, two: Machine
) -> None:
    one.tune(url, GRID[:1])
    (good,) = study.attempts()
    buckets = default_buckets([1024], [1], range(1, len(MALFORMED) + 1), ["float16"])
    for bucket, broken in zip(buckets, MALFORMED.values(), strict=True):
        result = broken({**copy.deepcopy(good.result), "nonce": f"{bucket.heads:016x}"})
        add(study, {"bucket": list(bucket), "machine": "m", "result": result})
    summary = two.tune(url, [*GRID[:1], *buckets])
    assert summary.tuned == []
    reasons = dict(summary.not_reached)
    for kind, bucket in zip(MALFORMED, buckets, strict=True):
        assert reasons.get(bucket, "").startswith("what m found is not used: "), kind
        assert "\n" not in reasons[bucket], kind
    assert set(two.winners()) == {row_bucket(row) for row in two.evidence()} == {GRID[0]}


def row_bucket(row: dict[str, Any]) -> Bucket:
    return Bucket(*(row[name] for name in Bucket._fields))


def add(study: FleetStudy, attributes: dict[str, Any]) -> None:
    """A finished attempt, whatever it says."""
    state = optuna.trial.TrialState.COMPLETE
    study.study.add_trial(optuna.trial.create_trial(state=state, value=1.0, user_attrs=attributes))


def test_attempts_of_odd_buckets_are_passed_over(url: str, study: FleetStudy, one: Machine) -> None:
    for odd in (None, 3, [1], [[]] * 8, ["x"] * 8):
        add(study, {"bucket": odd})
    one.tune(url)
    assert set(one.winners()) == set(GRID)


# --- the storage --------------------------------------------------------------------------------


def test_a_storage_that_goes_away_ends_the_run_and_loses_nothing(
    url: str, one: Machine, two: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = one.runners.fresh

    def away(shape: Shape, seed: int) -> Any:
        if one.runners.duels:
            monkeypatch.setattr(FleetStudy, "_trials", lost)
            monkeypatch.setattr(fleet_study.RDBStorage, "set_trial_user_attr", lost)
        return fresh(shape, seed)

    def lost(*args: object) -> None:
        raise optuna.exceptions.StorageInternalError("away") from OSError("the server\nis down")

    with monkeypatch.context() as patches:
        patches.setattr(one.runners, "fresh", away)
        with pytest.raises(FleetError, match=r"^lost the storage .*: the server is down; tuned b"):
            one.tune(url)
    assert set(one.winners()) == set(GRID[:2])
    monkeypatch.undo()
