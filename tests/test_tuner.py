from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
from fakes import FakeBackend, FakeRunner, FakeRunners, make_device

from mla_tuner import proposals, tuner
from mla_tuner.candidates import candidates, prior
from mla_tuner.device import MLX_VERSION
from mla_tuner.errors import BudgetError, BusyError, StoreError
from mla_tuner.evidence import Measurement
from mla_tuner.measure import Checked, machine_lock
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.store import Store
from mla_tuner.table import read_rows
from mla_tuner.tuner import (
    BucketSkipped,
    BucketStarted,
    BucketTuned,
    CandidateMeasured,
    RunStarted,
    default_buckets,
    tune,
)

DEVICE = make_device(4)


def device_time(shape: Shape, plan: Plan) -> float:
    """A device where mlx is fine on short contexts and the kernel wins on long ones."""
    unit = 1e-8
    if plan == MLX:
        return unit * shape.context * shape.batch * shape.heads
    if plan.path == "mlx_rows":
        return 1.5 * device_time(shape, MLX)
    return 2e-4 + 0.5 * unit * prior(plan, shape, 4)


def buckets(*contexts: int, heads: int = 16) -> list[Bucket]:
    return default_buckets(contexts, [1], [heads], ["bfloat16"])


def best_plan(shape: Shape, backend: FakeBackend | None = None) -> Plan:
    plans = candidates(shape.bucket, DEVICE, backend or FakeBackend())
    return min(plans, key=lambda plan: device_time(shape, plan))


# --- the order -----------------------------------------------------------------------------------


def test_likely_and_cheap_buckets_come_first() -> None:
    got = default_buckets([1024, 32768], [1, 8], [16, 128], ["bfloat16", "float32"])
    assert len(got) == len(set(got)) == 16
    assert [b.dtype for b in got] == ["bfloat16"] * 8 + ["float32"] * 8
    assert got[0] == Shape(1024, 1, 16).bucket
    assert got[7] == Shape(32768, 8, 128).bucket
    place = {(b.context, b.batch, b.heads): i for i, b in enumerate(got)}
    assert place[32768, 1, 16] < place[32768, 8, 16] < place[32768, 8, 128]
    assert place[32768, 1, 16] < place[32768, 1, 128]
    kinds = default_buckets(
        [1024], [1], [16], ["float16"], q_lens=[1, 2], layouts=["dense", "paged"]
    )
    assert [(b.layout, b.q_len) for b in kinds] == [
        ("dense", 1),
        ("dense", 2),
        ("paged", 1),
        ("paged", 2),
    ]


def test_shapes_of_one_bucket_are_tuned_once() -> None:
    assert len(default_buckets([4096, 4100, 4000], [3, 4], [16], ["bfloat16"])) == 1


# --- winners -------------------------------------------------------------------------------------


def test_the_best_plan_of_each_bucket_is_found_and_stored(store: Store) -> None:
    wanted = buckets(1024, 4096, 32768)
    summary = tune(store, DEVICE, wanted, budget_s=1e4, runners=FakeRunners(device_time, 0.01))
    assert [row.bucket for row in summary.tuned] == wanted
    assert summary.seconds > 0
    for row in summary.tuned:
        best = best_plan(row.bucket.shape)
        regret = device_time(row.bucket.shape, row.plan) / device_time(row.bucket.shape, best) - 1
        assert regret < 0.05
    assert summary.tuned[0].plan == MLX
    assert summary.tuned[-1].plan.path == "split"
    assert store.plans(DEVICE.key) == summary.tuned
    evidence = store.evidence(wanted[-1])
    assert {e["stage"] for e in evidence} == {"search", "duel"}
    searched = [e for e in evidence if e["stage"] == "search"]
    assert len(searched) == len(candidates(wanted[-1], DEVICE, FakeBackend()))
    assert store.rebuild() == 3
    assert store.plans(DEVICE.key) == summary.tuned


def test_serving_sees_what_was_tuned(store: Store) -> None:
    tune(store, DEVICE, buckets(32768), budget_s=1e4, runners=FakeRunners(device_time))
    policy = Policy(DEVICE, read_rows(store.path, DEVICE), backend=FakeBackend())
    decision = policy.decide(32768, 1, 16, "bfloat16")
    assert decision.source == "tuned"
    assert decision.plan.path == "split"
    assert decision.speedup_low is not None
    assert decision.speedup_low > 1.02


def test_a_wide_machine_is_searched_by_tpe_and_found_nearly_as_good(store: Store) -> None:
    wide, shape = make_device(132), Shape(1 << 17, 1, 128)
    plans = candidates(shape.bucket, wide, FakeBackend())
    assert len(plans) > proposals.EXHAUSTIVE

    def seconds(shape: Shape, plan: Plan) -> float:
        return (
            1.0
            if not plan.native
            else 1e-9
            * prior(plan, shape, 132)
            * (
                1.0 + 0.2 * (plan.tile == "r16")  # the prior is not the truth
            )
        )

    runners = FakeRunners(seconds, 0.01)
    summary = tune(store, wide, [shape.bucket], budget_s=1e4, runners=runners)
    best = min(seconds(shape, plan) for plan in plans)
    assert seconds(shape, summary.tuned[0].plan) < 1.1 * best
    measured = {(e["path"], e["partitions"], e["tile"]) for e in store.evidence()}
    assert len(measured) <= 2 + proposals.GROUP * (proposals.GROUPS + 1) < len(plans)


def test_a_wide_search_ends_with_neighbours_of_the_best_and_a_playoff(store: Store) -> None:
    """A peak one partition wide: proposals may miss it, the neighbours of the best do not."""
    wide, shape = make_device(132), Shape(1 << 17, 1, 16)

    def seconds(shape: Shape, plan: Plan) -> float:
        if not plan.native:
            return 1.0
        far = abs(plan.partitions - 23) / 23
        return (1e-3 if plan.partitions == 23 else 1.2e-3 * (1 + far)) * (1 + (plan.tile == "r32"))

    runners = FakeRunners(seconds, 0.01)
    summary = tune(store, wide, [shape.bucket], budget_s=1e4, runners=runners)
    assert summary.tuned[0].plan == Plan("split", 23, "r16")
    searched = [(e["path"], e["partitions"]) for e in store.evidence() if e["stage"] == "search"]
    playoff = searched[-1 - tuner.PLAYERS :]
    assert playoff[0] == ("mlx", 1)
    assert ("split", 23) in playoff
    assert searched.count(("split", 23)) >= 2


def test_by_gpu_time_a_hopeless_mlx_is_timed_once_before_its_duel(store: Store) -> None:
    wide, shape = make_device(132), Shape(1 << 17, 1, 128)

    def seconds(shape: Shape, plan: Plan) -> float:
        return 1e-9 * prior(plan, shape, 132) if plan.native else 1.0

    runners = FakeRunners(seconds, 1e-3, {"queued": True})
    summary = tune(store, wide, [shape.bucket], budget_s=1e4, runners=runners)
    evidence = store.evidence()
    mlx = [(e["stage"], e["rounds"]) for e in evidence if e["path"] == "mlx"]
    assert mlx == [("search", 1), ("duel", 6)]
    split = [e for e in evidence if e["path"] == "split" and e["stage"] == "search"]
    assert len(split) > proposals.GROUP  # of several races
    for row in split:
        truth = 1 / seconds(shape, Plan(row["path"], row["partitions"], row["tile"]))
        assert row["ratio"] == pytest.approx(truth, rel=0.02)
    plans = candidates(shape.bucket, wide, FakeBackend())
    best = min(seconds(shape, plan) for plan in plans)
    assert seconds(shape, summary.tuned[0].plan) < 1.03 * best


def test_by_gpu_time_an_mlx_that_is_close_takes_part_in_every_race(store: Store) -> None:
    wide, shape = make_device(132), Shape(1 << 17, 1, 128)
    runners = FakeRunners(lambda shape, plan: 1e-2, 1e-3, {"queued": True})
    tune(store, wide, [shape.bucket], budget_s=1e5, runners=runners)
    mlx = [e["rounds"] for e in store.evidence() if e["path"] == "mlx"]
    assert len(mlx) > 1
    assert min(mlx) >= 6


class Disturbed(FakeRunners):
    """Of a device that something else slows down for so many samples of each duel."""

    samples = 20

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[FakeRunner]:
        with super().fresh(shape, seed) as runner:
            runner.drift = lambda now: 10.0 if len(runner.calls) <= self.samples else 1.0
            yield runner


@pytest.mark.parametrize(
    ("queued", "samples", "duels"), [(True, 20, 2), (True, 0, 1), (True, 1000, 2), (False, 20, 1)]
)
def test_a_duel_that_contradicts_the_search_is_held_again(
    store: Store, queued: bool, samples: int, duels: int
) -> None:
    """GPU time has no host in it: what takes ten times as long is something else's."""
    runners = Disturbed(lambda shape, plan: 9e-3 if plan == MLX else 1e-3, 1e-3, {"queued": queued})
    runners.samples = samples
    (row,) = tune(store, DEVICE, buckets(32768), budget_s=1e4, runners=runners).tuned
    slow = [e for e in store.evidence() if e["path"] == row.plan.path and e["median_us"] > 5e3]
    assert [e["stage"] for e in slow].count("search") == duels - 1
    if queued and samples < 1000:
        assert row.median_us == pytest.approx(1000, rel=0.02)
    assert row.speedup == pytest.approx(9, rel=0.05)  # both were slow at the same time


def test_equal_plans_leave_mlx_in_place(store: Store) -> None:
    runners = FakeRunners(lambda shape, plan: 1e-2, 0.03)
    summary = tune(store, DEVICE, buckets(*CONTEXTS), budget_s=1e5, runners=runners)
    assert [row.plan for row in summary.tuned] == [MLX] * len(CONTEXTS)


CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


def test_where_nothing_can_win_mlx_needs_no_duel(store: Store) -> None:
    runners = FakeRunners(lambda shape, plan: 1e-2 if plan == MLX else 1.0)
    summary = tune(store, DEVICE, buckets(4096), budget_s=1e4, runners=runners)
    assert summary.tuned[0].plan == MLX
    assert [e["path"] for e in store.evidence() if e["stage"] == "duel"] == ["mlx"]
    assert store.rebuild() == 1


def test_wrong_plans_never_win(store: Store) -> None:
    def check(plan: Plan) -> Checked:
        return Checked(not plan.native, 0.1, "row error", 1e-3)

    runners = FakeRunners(device_time, options={"check_result": check})
    summary = tune(store, DEVICE, buckets(32768), budget_s=1e4, runners=runners)
    assert summary.tuned[0].plan == MLX
    assert [e["status"] for e in store.evidence()].count("wrong") == len(
        candidates(buckets(32768)[0], DEVICE, FakeBackend())
    ) - 2


# --- resuming and the budget ---------------------------------------------------------------------


def test_a_second_run_does_only_what_is_left(store: Store) -> None:
    runners = FakeRunners(device_time)
    tune(store, DEVICE, buckets(1024, 2048), budget_s=1e4, runners=runners)
    again = FakeRunners(device_time)
    summary = tune(store, DEVICE, buckets(1024, 2048, 4096), budget_s=1e4, runners=again)
    assert summary.skipped_known == buckets(1024, 2048)
    assert [row.bucket for row in summary.tuned] == buckets(4096)
    assert Shape(2048, 1, 16) not in again.made
    runs = store.check()["rows"]
    third = tune(store, DEVICE, buckets(1024, 2048, 4096), budget_s=1e4, runners=again)
    assert third.tuned == third.not_reached == []
    assert store.check()["rows"] == runs


def test_another_kernel_is_tuned_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(store, DEVICE, buckets(1024), budget_s=1e4, runners=FakeRunners(device_time))
    monkeypatch.setattr(tuner.backends, "get", lambda name: FakeBackend(kernel="new"))
    summary = tune(store, DEVICE, buckets(1024), budget_s=1e4, runners=FakeRunners(device_time))
    assert len(summary.tuned) == 1
    assert len(store.plans()) == 2
    assert [row.bucket for row in store.tuned(DEVICE, "new", MLX_VERSION)] == buckets(1024)


def slow(shape: Shape, plan: Plan) -> float:
    return (1e-8 if plan.native else 1e-6 * shape.heads) * shape.context


def test_what_does_not_fit_in_the_budget_is_passed_over_and_said(store: Store) -> None:
    runners = FakeRunners(slow, options={"check_result": lambda p: Checked(True, 0.0, "", 1e-2)})
    wanted = [*buckets(1024), *buckets(1 << 20), *buckets(2048)]
    summary = tune(store, DEVICE, wanted, budget_s=10.0, runners=runners)
    assert [row.bucket.context for row in summary.tuned] == [1024, 2048]
    ((bucket, reason),) = summary.not_reached
    assert bucket.context == 1 << 20
    assert reason.startswith("needs about ")
    assert runners.now() < 10.0


def test_the_budget_holds_whatever_the_grid(store: Store) -> None:
    wanted = default_buckets(CONTEXTS, [1, 2, 4, 8], [16, 128], ["bfloat16"])
    runners = FakeRunners(slow, 0.05)
    summary = tune(store, DEVICE, wanted, budget_s=60.0, runners=runners)
    assert runners.now() < 61.0
    assert len(summary.tuned) > 10
    assert {row.bucket.heads for row in summary.tuned} == {16, 128}
    done = len(summary.tuned) + len(summary.not_reached)
    assert done == len(wanted)
    assert all(reason for _, reason in summary.not_reached)


def test_a_budget_for_nothing_is_an_error(store: Store) -> None:
    with pytest.raises(BudgetError, match=r"budget of 0.1 s is too small for a single bucket"):
        tune(store, DEVICE, buckets(1 << 20), budget_s=0.1, runners=FakeRunners(slow))
    with pytest.raises(BudgetError):
        tune(store, DEVICE, buckets(1024), budget_s=0.0, runners=FakeRunners(slow))


def test_a_bucket_that_the_budget_cuts_keeps_its_evidence_without_a_winner(store: Store) -> None:
    """The estimate comes from a quick trial; the checks then take far longer than it said."""
    options = {"check_result": lambda plan: Checked(True, 0.0, "", 2.0)}
    runners = FakeRunners(device_time, options=options)
    with pytest.raises(BudgetError, match="ended before its verdict"):
        tune(store, DEVICE, buckets(4096), budget_s=12.0, runners=runners)
    assert store.plans() == []
    evidence = store.evidence()
    assert {e["stage"] for e in evidence} == {"cut"}
    assert "timeout" in {e["status"] for e in evidence}
    assert store.tuned(DEVICE, "digest", MLX_VERSION) == []


def test_a_duel_that_the_budget_cuts_has_no_verdict(store: Store) -> None:
    def seconds(shape: Shape, plan: Plan) -> float:
        late = runners.now() > 1.0  # the device gets slow in the middle of the bucket
        return (5.0 if late else 0.1) * (1.0 if plan == MLX else 0.5)

    runners = FakeRunners(seconds)
    with pytest.raises(BudgetError):
        tune(store, DEVICE, buckets(1024), budget_s=30.0, runners=runners)
    assert store.plans() == []
    assert {e["stage"] for e in store.evidence()} == {"cut"}


# --- faults --------------------------------------------------------------------------------------


def test_a_failing_mlx_is_a_failed_bucket_and_the_run_goes_on(store: Store) -> None:
    def seconds(shape: Shape, plan: Plan) -> float:
        if shape.context > 2048 and not plan.native:
            raise MemoryError("1M tokens")
        return device_time(shape, plan)

    summary = tune(store, DEVICE, buckets(1024, 4096), budget_s=1e4, runners=FakeRunners(seconds))
    assert [row.bucket.context for row in summary.tuned] == [1024]
    ((bucket, reason),) = summary.failed
    assert bucket.context == 4096
    assert reason == "mlx itself failed: MemoryError: 1M tokens"
    assert {e["stage"] for e in store.evidence(bucket)} == {"cut"}
    again = tune(store, DEVICE, buckets(4096), budget_s=1e4, runners=FakeRunners(device_time))
    assert len(again.tuned) == 1


def test_an_interrupt_keeps_what_is_finished(store: Store) -> None:
    def seconds(shape: Shape, plan: Plan) -> float:
        if shape.context == 4096:
            raise KeyboardInterrupt
        return device_time(shape, plan)

    with pytest.raises(KeyboardInterrupt):
        tune(store, DEVICE, buckets(1024, 4096), budget_s=1e4, runners=FakeRunners(seconds))
    assert [row.bucket.context for row in store.plans()] == [1024]
    with machine_lock():
        pass


def test_a_second_tuner_is_refused(store: Store) -> None:
    with machine_lock(), pytest.raises(BusyError):
        tune(store, DEVICE, buckets(1024), budget_s=1.0, runners=FakeRunners(device_time))


def test_a_store_that_refuses_ends_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise StoreError("cannot use the database: disk is full")

    monkeypatch.setattr(store, "record", full)
    with pytest.raises(StoreError, match="disk is full"):
        tune(store, DEVICE, buckets(1024), budget_s=1e4, runners=FakeRunners(device_time))


# --- events and samplers -------------------------------------------------------------------------


def test_progress_tells_the_whole_story(store: Store) -> None:
    events: list[object] = []
    wanted = [*buckets(1024), *buckets(1 << 20)]
    runners = FakeRunners(slow, options={"check_result": lambda p: Checked(True, 0.0, "", 1e-2)})
    tune(store, DEVICE, wanted, budget_s=10.0, runners=runners, progress=events.append)
    begun, started, *candidates_, tuned, skipped = events
    assert begun == RunStarted(DEVICE, 10.0, 2, ())
    assert isinstance(started, BucketStarted)
    assert (started.bucket, started.number, started.total) == (wanted[0], 1, 2)
    assert isinstance(tuned, BucketTuned)
    assert tuned.row.plan.native
    assert tuned.seconds > 0
    assert isinstance(skipped, BucketSkipped)
    assert skipped.bucket == wanted[1]
    assert candidates_
    assert all(isinstance(event, CandidateMeasured) for event in candidates_)


def test_progress_tells_what_is_known_but_nothing_beside_another_tuner(store: Store) -> None:
    events: list[object] = []
    for _ in range(2):
        tune(store, DEVICE, buckets(1024), budget_s=1e4, runners=FakeRunners(slow))
    with machine_lock(), pytest.raises(BusyError):
        tune(store, DEVICE, buckets(1024), budget_s=1e4, progress=events.append)
    assert events == []
    tune(store, DEVICE, buckets(1024, 2048), budget_s=0.0, progress=events.append)
    (row,) = store.plans()
    assert events[0] == RunStarted(DEVICE, 0.0, 2, (row.day,))


def measured(plan: Plan, ratio: float | None) -> Measurement:
    return Measurement(Shape(4096, 1, 16), plan, "ok" if ratio else "error", ratio=ratio)


def test_the_grid_asks_for_every_plan_once() -> None:
    plans = [Plan("mlx_rows"), *(Plan("split", p, "r16") for p in range(2, 9))]
    grid = proposals.Grid(plans, seed=1)
    assert grid.ask() == plans
    grid.tell([measured(MLX, 1.0), *(measured(p, 1.0 * p.partitions) for p in plans[:-1])])
    grid.tell([measured(plans[-1], None)])
    assert grid.ask() == []
    states = [trial.state.name for trial in grid.study.trials]
    assert sorted(states) == ["COMPLETE"] * 7 + ["FAIL"]
    assert plans[grid.study.best_params["plan"]] == plans[-2]


def test_tpe_proposes_only_legal_plans_the_likely_ones_first() -> None:
    rng = random.Random(1)
    plans = [
        Plan("mlx_rows"),
        *(Plan("single", 1, tile) for tile in ("r16", "r32")),
        *(Plan("split", p, tile) for tile in ("r16", "r32") for p in range(2, 65)),
    ]
    rng.shuffle(plans)
    tpe = proposals.Tpe(plans, seed=1)
    seen: list[Plan] = []
    group = tpe.ask()
    assert group == plans[: proposals.GROUP]
    while group:
        assert set(group) <= set(plans)
        assert not set(group) & set(seen)
        seen += group
        tpe.tell([measured(p, 10 / (1 + abs(p.partitions - 30)) or None) for p in group])
        group = tpe.ask()
    assert len(seen) > proposals.GROUP
    assert min(abs(p.partitions - 30) for p in seen) <= 2


def test_an_impatient_search_ends_with_its_gains_and_with_the_neighbours() -> None:
    plans = [Plan("split", p, "r16") for p in range(2, 129)]

    def groups(patient: bool, gain: float = 0.0) -> list[list[Plan]]:
        tpe, found = proposals.Tpe(plans, 0, patient), []
        while group := tpe.ask():
            found.append(group)
            tpe.tell([measured(p, 1 + gain * len(found) + p.partitions * 1e-5) for p in group])
        return found

    brief = groups(False)
    assert len(brief) == 3  # nothing was gained by the second: one of neighbours follows
    assert len(groups(True)) > 3
    assert len(groups(False, gain=0.1)) > 3
    seen = {plan for group in brief[:2] for plan in group}
    best = max(seen, key=lambda plan: plan.partitions)
    near = [abs(math.log(plan.partitions / best.partitions)) for plan in brief[-1]]
    left = [plan for plan in plans if plan not in {*seen, *brief[-1]}]
    assert max(near) <= min(abs(math.log(plan.partitions / best.partitions)) for plan in left)


def test_optuna_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposals.Grid([Plan("mlx_rows")], seed=0).ask()
        proposals.Tpe([Plan("mlx_rows")], seed=0).ask()
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.ERROR
