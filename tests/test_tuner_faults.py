"""Tuning when things go wrong: each fault ends in a stored status and one line."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import FakeRunner, FakeRunners, make_device

from mla_tuner import tuner
from mla_tuner.conditions import PATIENCE_S
from mla_tuner.errors import BudgetError, BusyError, DeviceError
from mla_tuner.evidence import LATE
from mla_tuner.measure import Checked, LateError
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.store import Store
from mla_tuner.tuner import (
    SIGN_OF_LIFE,
    BucketStarted,
    BucketTuned,
    Event,
    Waiting,
    default_buckets,
    tune,
)

DEVICE = make_device(4)
BUCKETS = default_buckets([1024, 2048, 4096], [1], [16], ["bfloat16"])
DEATH = "the process of the duel died (signal 9)"


def truth(shape: Shape, plan: Plan) -> float:
    """Splitting pays everywhere."""
    return shape.context * (1e-5 if plan == MLX else 5e-6 + 1e-6 / plan.partitions)


def statuses(store: Store, bucket: Bucket) -> Counter[tuple[str, str]]:
    return Counter((row["stage"], row["status"]) for row in store.evidence(bucket))


def run_row(store: Store) -> dict[str, dict[str, object]]:
    with sqlite3.connect(store.path) as db:
        row = db.execute("SELECT options, conditions FROM run ORDER BY id DESC").fetchone()
    return {"options": json.loads(row[0]), "conditions": json.loads(row[1])}


# --- budgets and grids ---------------------------------------------------------------------------


def test_a_budget_of_nothing_stores_the_run_and_nothing_else(store: Store) -> None:
    runners = FakeRunners(truth)
    with pytest.raises(BudgetError, match=r"^a budget of 0 s is too small for a single bucket"):
        tune(store, DEVICE, BUCKETS, budget_s=0.0, runners=runners)
    rows = store.check()["rows"]
    assert (rows["run"], rows["measurement"], rows["plan"]) == (1, 0, 0)
    assert runners.made == []


def test_where_no_plan_but_mlx_is_legal_mlx_is_the_winner(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "candidates", lambda bucket, device, backend: [MLX])
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=FakeRunners(truth))
    assert [row.plan for row in summary.tuned] == [MLX] * len(BUCKETS)
    assert statuses(store, BUCKETS[0]) == {("duel", "ok"): 1}


def test_where_all_else_is_wrong_mlx_is_the_winner(store: Store) -> None:
    wrong = Checked(False, 0.3, "row error 3.0e-01 exceeds 2.5e-03", 1e-3)
    right = Checked(True, 1e-3, "", 1e-3)
    options = {"check_result": lambda plan: right if plan == MLX else wrong}
    summary = tune(
        store, DEVICE, BUCKETS[:1], budget_s=1e4, runners=FakeRunners(truth, options=options)
    )
    assert [row.plan for row in summary.tuned] == [MLX]
    found = statuses(store, BUCKETS[0])
    assert found[("search", "wrong")] >= 3
    assert found[("duel", "ok")] == 1


def test_a_wrong_mlx_fails_its_buckets_but_the_device_lives(store: Store) -> None:
    options = {"check_result": lambda plan: Checked(plan.native, 0.3, "NaN", 1e-3)}
    runners = FakeRunners(truth, options=options)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert [reason for _, reason in summary.failed] == ["mlx itself failed: NaN"] * 3
    assert store.plans() == []
    assert statuses(store, BUCKETS[2])[("cut", "wrong")] == 2


# --- a device that fails -------------------------------------------------------------------------


def vanishing(moment_s: float, fault: Callable[[], float]) -> FakeRunners:
    """From some moment on every sample ends in `fault`."""

    def seconds(shape: Shape, plan: Plan) -> float:
        return fault() if runners.now() > moment_s else truth(shape, plan)

    runners = FakeRunners(seconds)
    return runners


def gone() -> float:
    raise RuntimeError("[metal] device lost\nno more details")


@pytest.mark.parametrize(
    ("share", "fault", "cause"),
    [
        (0.0, gone, "RuntimeError: [metal] device lost no more details"),
        (0.3, gone, "RuntimeError: [metal] device lost no more details"),
        (0.5, gone, "RuntimeError: [metal] device lost no more details"),
        (0.95, gone, "RuntimeError: [metal] device lost no more details"),
        (0.1, lambda: math.nan, "the clock gave nan s"),
        (0.6, lambda: 0.0, "the clock gave 0.0 s"),
    ],
)
def test_a_device_that_vanishes_ends_the_run_after_recording(
    store: Store, tmp_path: Path, share: float, fault: Callable[[], float], cause: str
) -> None:
    """At any moment of the second bucket: in its search, after `mlx` left that, or in its duel."""
    ends: list[float] = []
    whole = FakeRunners(truth)
    with Store(tmp_path / "whole.db") as other:
        tune(
            *(other, DEVICE, BUCKETS[:2]),
            budget_s=1e4,
            runners=whole,
            progress=lambda event: ends.append(whole.now()) if type(event) is BucketTuned else None,
        )
    runners = vanishing(ends[0] + share * (ends[1] - ends[0]), fault)
    with pytest.raises(DeviceError) as stop:
        tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    line = f"{DEVICE.key} stopped working ({cause}); finished buckets are stored"
    assert str(stop.value) == line
    assert [row.bucket for row in store.plans()] == BUCKETS[:1]
    assert BUCKETS[2].shape not in runners.made  # no hammering
    assert runners.made[-1] == SIGN_OF_LIFE
    assert {stage for stage, _ in statuses(store, BUCKETS[1])} == {"cut"}
    assert statuses(store, BUCKETS[1])[("cut", "error")] >= 2
    again = tune(store, DEVICE, BUCKETS[:2], budget_s=1e4, runners=FakeRunners(truth))
    assert [row.bucket for row in again.tuned] == BUCKETS[1:2]


def test_no_memory_on_one_shape_is_no_vanished_device(store: Store) -> None:
    def seconds(shape: Shape, plan: Plan) -> float:
        if shape.context == 2048:
            raise MemoryError("the cache takes 9.0 GiB, a quarter of memory is 6.0")
        return truth(shape, plan)

    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=FakeRunners(seconds))
    assert [row.bucket for row in summary.tuned] == [BUCKETS[0], BUCKETS[2]]
    ((bucket, reason),) = summary.failed
    assert bucket == BUCKETS[1]
    assert reason.startswith("mlx itself failed: MemoryError: the cache takes 9.0 GiB")


WIDE = make_device(132, "cuda")  # has more plans than one race
ILLEGAL = "an illegal memory access was encountered"


@dataclass
class Sticky(FakeRunners):
    """Whose search's process is lost at the check of its `at`-th native plan."""

    at: int = 0
    native: int = 0
    lost: bool = False

    def __call__(self, shape: Shape, seed: int) -> FakeRunner:
        runner = super().__call__(shape, seed)
        runner.check_result, runner.executed = self._check, self._ran
        return runner

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[FakeRunner]:
        """In another process; the search's ends, for it can't make room."""
        self.lost = False
        yield self(shape, seed)

    def _check(self, plan: Plan) -> Checked:
        self.native += plan.native
        self.lost |= plan.native and self.native == self.at
        self._ran(plan)
        return Checked(True, 1e-6, "", 1e-4)

    def _ran(self, plan: Plan) -> Plan:
        if self.lost:
            raise RuntimeError(ILLEGAL)
        return plan


LONG = default_buckets([1 << 17, 1 << 18], [1], [16], ["bfloat16"])


def split_pays(shape: Shape, plan: Plan) -> float:
    return shape.context * (1e-8 + 1e-8 / plan.partitions if plan.native else 1e-7)


@pytest.mark.parametrize("at", [14, 20, 30])
def test_the_best_plan_until_the_device_was_lost_meets_mlx(store: Store, at: int) -> None:
    """In a race without the baseline, which was hopeless, and in the playoff."""
    runners = Sticky(split_pays, options={"queued": True}, at=at)
    summary = tune(store, WIDE, LONG, budget_s=1e6, runners=runners)
    assert runners.native > at
    assert statuses(store, LONG[0])[("search", "error")] > 1
    assert [row.plan.path for row in summary.tuned] == ["split", "split"]


def test_a_device_lost_in_the_first_race_costs_its_bucket(store: Store) -> None:
    runners = Sticky(split_pays, options={"queued": True}, at=5)
    summary = tune(store, WIDE, LONG, budget_s=1e6, runners=runners)
    assert summary.failed == [(LONG[0], f"mlx itself failed: RuntimeError: {ILLEGAL}")]
    assert [row.bucket for row in summary.tuned] == LONG[1:]


def test_a_race_in_which_everything_fails_is_no_verdict(store: Store) -> None:
    """Nothing had come close to `mlx` before; nothing is known of the rest."""

    def seconds(shape: Shape, plan: Plan) -> float:
        return shape.context * (1e-7 if plan.native else 1e-8)

    runners = Sticky(seconds, options={"queued": True}, at=14)
    summary = tune(store, WIDE, LONG[:1], budget_s=1e6, runners=runners)
    assert summary.failed == [(LONG[0], f"mlx itself failed: RuntimeError: {ILLEGAL}")]
    assert store.plans() == []
    assert {stage for stage, _ in statuses(store, LONG[0])} == {"cut"}


# --- a host that is late -------------------------------------------------------------------------


def late_for(late: Callable[[Plan], bool]) -> FakeRunners:
    def seconds(shape: Shape, plan: Plan) -> float:
        if late(plan):
            raise LateError(f"{LATE}: the last chain took it 60 ms")
        return truth(shape, plan)

    return FakeRunners(seconds, options={"queued": True})


@pytest.mark.parametrize("path", ["mlx", "mlx_rows"])
def test_nothing_follows_from_plans_that_the_host_was_too_late_for(store: Store, path: str) -> None:
    """Not that `mlx` can't run, nor that nothing beats it."""
    runners = late_for(lambda plan: (plan == MLX) == (path == "mlx"))
    summary = tune(store, DEVICE, BUCKETS[:1], budget_s=1e4, runners=runners)
    reason = f"{path} itself failed: {LATE}: the last chain took it 60 ms"
    assert summary.failed == [(BUCKETS[0], reason)]
    assert store.plans() == []
    assert {stage for stage, _ in statuses(store, BUCKETS[0])} == {"cut"}


def test_who_beats_mlx_is_not_kept_waiting_by_who_could_not_be_timed(store: Store) -> None:
    runners = late_for(lambda plan: plan.path == "split")
    (row,) = tune(store, DEVICE, BUCKETS[:1], budget_s=1e4, runners=runners).tuned
    assert row.plan.path == "mlx_rows"
    assert statuses(store, BUCKETS[0])[("search", "timeout")] > 1


# --- the process of the duel ---------------------------------------------------------------------


@dataclass
class Mortal(FakeRunners):
    """Whose duels die at the samples of some plans."""

    dies: Callable[[Plan], bool] = lambda plan: True

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[FakeRunner]:
        runner = self(shape, seed)
        sample = runner.sample

        def deadly(plan: Plan, inner: int) -> tuple[float, Plan | None]:
            if self.dies(plan) and shape != SIGN_OF_LIFE:
                raise DeviceError(DEATH)
            return sample(plan, inner)

        runner.sample = deadly  # type: ignore[method-assign]
        yield runner


def test_a_plan_that_kills_the_duel_loses_it(store: Store) -> None:
    runners = Mortal(truth, dies=lambda plan: plan != MLX)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert [row.plan for row in summary.tuned] == [MLX] * 3
    assert statuses(store, BUCKETS[0])[("duel", "error")] == 1
    (row,) = (r for r in store.evidence(BUCKETS[0]) if r["status"] == "error")
    assert row["message"] == DEATH


def test_a_duel_that_dies_with_mlx_has_no_verdict_and_tuning_goes_on(store: Store) -> None:
    runners = Mortal(truth)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert summary.failed == [(bucket, f"mlx itself failed: {DEATH}") for bucket in BUCKETS]
    assert store.plans() == []
    assert statuses(store, BUCKETS[0])[("cut", "error")] == 2
    again = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=FakeRunners(truth))
    assert len(again.tuned) == 3


def test_each_duel_has_a_runner_of_its_own(store: Store) -> None:
    runners = FakeRunners(truth)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert all(row.plan.native for row in summary.tuned)
    assert runners.duels == [bucket.shape for bucket in BUCKETS]


# --- the state of the machine --------------------------------------------------------------------


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> FakeRunners:
    """What `tune` makes when it is not told what to measure."""
    runners = FakeRunners(truth, 0.05)
    monkeypatch.setattr(tuner, "IsolatedRunners", lambda device: runners)
    return runners


def test_the_state_of_the_machine_and_force_are_stored_with_the_run(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(device, *, force, patience_s, tell):
        tell("waiting up to 10 s: low-power mode is on")
        return {"low_power_mode": True, "forced": "low-power mode is on"} if force else {}

    events: list[Event] = []
    monkeypatch.setattr(tuner, "settle", settle)
    tune(store, DEVICE, BUCKETS[:1], budget_s=1e4, progress=events.append, force=True)
    stored = run_row(store)
    assert stored["options"]["force"] is True
    assert stored["conditions"]["forced"] == "low-power mode is on"
    assert events[1] == Waiting("waiting up to 10 s: low-power mode is on")
    tune(store, DEVICE, BUCKETS[:2], budget_s=1e4)
    assert run_row(store)["options"]["force"] is False


def test_on_a_gpu_the_run_says_by_which_clock_and_the_summary_what_was_compiled(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "settle", lambda device, **options: {"load_1m": 0.1})
    live.kernels, live.options["queued"] = [("small r16", 2.0)], True
    summary = tune(store, make_device(132, "cuda"), BUCKETS[:1], budget_s=1e4)
    assert run_row(store)["conditions"] == {"load_1m": 0.1, "clock": "gpu"}
    assert summary.compiled == [("small r16", 2.0)]
    tune(store, DEVICE, BUCKETS[:1], budget_s=1e4)
    assert run_row(store)["conditions"] == {"load_1m": 0.1}


def reckoned(store: Store) -> tuple[list[float], list[float]]:
    """What the tuner thought that two buckets would take, and what they took."""
    events: list[Event] = []
    tune(store, DEVICE, BUCKETS[:2], budget_s=1e4, progress=events.append)
    return (
        [event.estimate_s for event in events if isinstance(event, BucketStarted)],
        [event.seconds for event in events if isinstance(event, BucketTuned)],
    )


@pytest.mark.parametrize("again", [False, True])
def test_what_is_compiled_once_for_all_is_not_reckoned_for_the_next_bucket(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A budget of a minute passed over all but the first bucket, whose kernels had taken half.
    Where each duel has a new process, each bucket compiles.
    """
    monkeypatch.setattr(tuner, "settle", lambda device, **options: {})
    live.kept = not again
    check = FakeRunner.check

    def compiles(runner: FakeRunner, plan: Plan) -> Checked:
        if plan.native and not live.kernels:
            live.kernels.append(("small r16", 30.0))
            runner.clock += 30.0
        return check(runner, plan)

    monkeypatch.setattr(FakeRunner, "check", compiles)
    estimates, done = reckoned(store)
    assert done[0] > 30.0 > 2 * done[1]
    assert (estimates[1] > 30.0) is again


@pytest.mark.parametrize("left", [0, 1])
def test_kernels_that_a_dead_process_had_are_not_reckoned_for_the_next_bucket(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Fewer are ready after a bucket than before it: it has not taken longer for that."""
    monkeypatch.setattr(tuner, "settle", lambda device, **options: {})
    live.kernels = [("small r16", 30.0), ("small r32", 30.0)]
    check = FakeRunner.check

    def dies(runner: FakeRunner, plan: Plan) -> Checked:
        del live.kernels[left:]
        return check(runner, plan)

    monkeypatch.setattr(FakeRunner, "check", dies)
    estimates, done = reckoned(store)
    assert done[0] <= estimates[1] < 30.0


def test_a_machine_that_is_not_fit_is_refused_before_anything_is_stored(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(device, **options):
        raise BusyError("other processes use 2.0 of 2 cores")

    monkeypatch.setattr(tuner, "settle", settle)
    with pytest.raises(BusyError, match="other processes"):
        tune(store, DEVICE, BUCKETS, budget_s=1e4)
    assert store.check()["rows"]["run"] == 0
    assert live.made == []
    for budget_s in (0.0, 0.01):  # nothing will be timed: nothing to be fit for
        with pytest.raises(BudgetError):
            tune(store, DEVICE, BUCKETS, budget_s=budget_s)
    tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=FakeRunners(truth))
    tune(store, DEVICE, BUCKETS, budget_s=1e4)  # all are tuned


def test_the_machine_is_waited_for_within_the_budget(
    store: Store, live: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of a second waited ten, to say that it was too small."""
    asked: list[float] = []

    def settle(device, *, patience_s, **options):
        asked.append(patience_s)
        return {}

    monkeypatch.setattr(tuner, "settle", settle)
    for budget_s in (2.0, 1e4):
        with suppress(BudgetError):
            tune(store, DEVICE, BUCKETS, budget_s=budget_s)
    assert asked == [2.0, PATIENCE_S]


def test_dropped_rounds_are_counted_over_the_run(store: Store) -> None:
    restless = FakeRunners(lambda shape, plan: 1e-2, 0.1)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e5, runners=restless)
    assert summary.dropped > 10
    assert summary.paused_s > summary.dropped * 0.04
    quiet = tune(store, make_device(2), BUCKETS, budget_s=1e5, runners=FakeRunners(truth))
    assert (quiet.dropped, quiet.paused_s) == (0, 0.0)


# --- upgrades ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlx", "system"])
def test_after_an_upgrade_old_winners_are_confirmed_before_anything_is_searched(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(store, DEVICE, BUCKETS[:2], budget_s=1e4, runners=FakeRunners(truth))
    before = {row.bucket: row.plan for row in store.plans()}
    searched = store.check()["rows"]["measurement"]
    software = {**tuner.devices.software(), name: "another"}
    monkeypatch.setattr(tuner.devices, "software", lambda: software)

    def lost(shape: Shape, plan: Plan) -> float:  # splitting long contexts pays no more
        return truth(shape, plan) * (3 if shape == BUCKETS[1].shape and plan.native else 1)

    summary = tune(store, DEVICE, BUCKETS[:2], budget_s=1e4, runners=FakeRunners(lost))
    plans = {row.bucket: row.plan for row in summary.tuned}
    assert plans[BUCKETS[0]] == before[BUCKETS[0]]
    assert not plans[BUCKETS[1]].native
    assert len(store.evidence(BUCKETS[0])) < searched / 2 + 3  # one search, and two short duels
    third = tune(store, DEVICE, BUCKETS[:2], budget_s=1e4, runners=FakeRunners(lost))
    assert third.skipped_known == BUCKETS[:2]
