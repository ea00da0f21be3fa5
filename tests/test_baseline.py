"""Where `mlx` itself can't run: the next of MLX's paths that does takes its part everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, FakeRunner, FakeRunners, make_device

from mla_tuner import answers, report, share, tuner
from mla_tuner.evidence import Measurement, baseline, verdict
from mla_tuner.fits import Speedups, Tuned, between, path_between
from mla_tuner.measure import Checked, measure
from mla_tuner.plan import MLX, MLX_PLANS, Plan
from mla_tuner.policy import Policy
from mla_tuner.recheck import Versions, recheck, revalidate, stale
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.table import Row, read_rows
from mla_tuner.tuner import default_buckets, tune

DEVICE = make_device(4)
ROWS, FUSED = Plan("mlx_rows"), Plan("mlx_fused")
SINGLE, SPLIT = Plan("single", 1, "r16"), Plan("split", 2, "r16")
BUCKETS = default_buckets([1024, 2048], [1], [16], ["bfloat16"])
SHAPE = BUCKETS[1].shape
NO_MEMORY = "RuntimeError: out of memory"


def truth(shape: Shape, plan: Plan) -> float:
    """`mlx` has no memory for the longer context; splitting pays everywhere."""
    if plan == MLX and shape == SHAPE:
        raise RuntimeError("out of memory")
    return shape.context * (1e-5 if not plan.native else 5e-6 + 1e-6 / plan.partitions)


def kept(shape: Shape, plan: Plan) -> float:
    """The same, but our kernel is slow."""
    return truth(shape, plan) * (4 if plan.native else 1)


def tuned(store: Store, seconds: Any = truth, **options: object) -> Row:
    """The winner of the longer context."""
    runners = FakeRunners(seconds, options=dict(options))
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert summary.failed == []
    return next(row for row in summary.tuned if row.bucket == BUCKETS[1])


def reason(store: Store) -> str:
    found = store._db.query("SELECT reason FROM plan WHERE context = ?", [SHAPE.context])
    return str(next(found)["reason"])


def served(store: Store) -> Policy:
    return Policy(DEVICE, read_rows(store.path, DEVICE), backend=FakeBackend())


# --- races ---------------------------------------------------------------------------------------


def seconds(plan: Plan) -> float:
    if plan == MLX:
        raise RuntimeError("out of memory")
    return 2e-3 if plan in MLX_PLANS else 1e-3


def test_ratios_of_a_race_are_to_the_first_of_its_baselines_that_runs() -> None:
    plans = [MLX, FUSED, SINGLE, ROWS]
    found = measure(SHAPE, plans, budget_s=99.0, runner=FakeRunner(seconds), baselines=MLX_PLANS)
    assert [(m.status, m.message) for m in found[:2]] == [("error", NO_MEMORY), ("ok", "")]
    assert [m.ratio for m in found[1:]] == [1.0, 2.0, 1.0]
    default = baseline(found)
    assert default is not None
    assert default.plan == ROWS


def test_without_leave_nothing_stands_in_for_mlx() -> None:
    found = measure(SHAPE, [MLX, ROWS, SINGLE], budget_s=99.0, runner=FakeRunner(seconds))
    assert [m.ratio for m in found] == [None] * 3  # `mla-tune bench` says "vs mlx"


def test_one_that_stands_in_is_the_canary() -> None:
    runner = FakeRunner(seconds)
    runner.drift = lambda now: 2.0 if 0.05 < now < 0.06 else 1.0
    plans = [MLX, ROWS, Plan("split", 2)]
    found = measure(SHAPE, plans, budget_s=99.0, runner=runner, baselines=MLX_PLANS)
    assert found[1].dropped == 0  # twice as fast is not close
    runner = FakeRunner(lambda plan: seconds(plan) * (0.7 if plan in MLX_PLANS else 1.0))
    runner.drift = lambda now: 2.0 if 0.05 < now < 0.06 else 1.0
    found = measure(SHAPE, plans, budget_s=99.0, runner=runner, baselines=MLX_PLANS)
    assert found[1].dropped > 0
    assert "mlx_rows drifted" in found[1].message


def test_a_baseline_that_fails_half_way_makes_room_for_the_next() -> None:
    calls = 0

    def late(plan: Plan) -> float:
        nonlocal calls
        calls += plan == MLX
        if plan == MLX and calls > 8:
            raise RuntimeError("out of memory")
        return 1e-3

    plans = [MLX, ROWS, SINGLE]
    found = measure(SHAPE, plans, budget_s=99.0, runner=FakeRunner(late), baselines=MLX_PLANS)
    assert [m.status for m in found] == ["error", "ok", "ok"]
    assert found[2].ratio == 1.0
    assert found[2].rounds >= 6


# --- tuning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"queued": True}])
def test_a_bucket_that_mlx_cannot_run_gets_a_plan_over_the_next_path(
    store: Store, options: dict[str, object]
) -> None:
    row = tuned(store, **options)
    assert row.plan.path == "split"
    assert row.baseline == "mlx_rows"
    assert row.speedup == pytest.approx(truth(SHAPE, ROWS) / truth(SHAPE, row.plan), rel=0.01)
    assert reason(store).endswith(
        f"; mlx itself can't run here: {NO_MEMORY}; compared with mlx_rows"
    )
    found = store.evidence(BUCKETS[1])
    assert [(e["stage"], e["status"]) for e in found if e["path"] == "mlx"] == [("search", "error")]
    assert [e["path"] for e in found if e["stage"] == "duel"] == ["mlx_rows", "split"]
    (other,) = (row for row in store.plans() if row.bucket == BUCKETS[0])
    assert other.baseline == "mlx"


@pytest.mark.parametrize("queued", [False, True])
def test_a_wide_search_goes_on_with_the_next_path(store: Store, queued: bool) -> None:
    """In groups, and by GPU time without a baseline that is hopeless."""
    device = make_device(132)
    wide = [bucket._replace(context=bucket.context << 5) for bucket in BUCKETS]

    def seconds(shape: Shape, plan: Plan) -> float:
        if plan == MLX:
            raise RuntimeError("out of memory")
        return 1e-2 if not plan.native else 1e-3 + abs(plan.partitions - 40) * 1e-5

    runners = FakeRunners(seconds, options={"queued": queued})
    summary = tune(store, device, wide, budget_s=1e5, runners=runners)
    assert [row.baseline for row in summary.tuned] == ["mlx_rows"] * 2
    assert all(row.speedup == pytest.approx(10.0, rel=0.02) for row in summary.tuned)
    found = [e for e in store.evidence(wide[0]) if e["stage"] == "search" and e["path"] == "mlx"]
    assert [e["status"] for e in found] == ["error"]  # asked once
    groups = [e for e in store.evidence(wide[0]) if e["path"] == "mlx_rows"]
    assert len(groups) == 2 if queued else len(groups) > 3


def test_where_nothing_beats_the_stand_in_it_is_the_plan(store: Store) -> None:
    row = tuned(store, kept)
    assert (row.plan, row.speedup, row.stays) == (ROWS, 1.0, True)
    decision = served(store).decide(2048, 1, 16, "bfloat16")
    assert (decision.plan, decision.source) == (ROWS, "tuned")
    assert "nothing beats mlx_rows at context 2048, where mlx itself can't run" in decision.reason


def test_where_mlx_is_wrong_another_path_stands_in(store: Store) -> None:
    def check(plan: Plan) -> Checked:
        return Checked(plan != MLX, 0.5, "row error", 1e-3)

    row = tuned(store, lambda shape, plan: 1e-3 if plan.native else 2e-3, check_result=check)
    assert (row.plan.native, row.baseline) == (True, "mlx_rows")
    assert "mlx itself can't run here: row error" in reason(store)


def test_a_baseline_that_fails_in_the_duel_leaves_the_bucket_to_the_next_run(store: Store) -> None:
    died = {"mlx_rows": 0}

    def seconds(shape: Shape, plan: Plan) -> float:
        if plan == ROWS and shape == SHAPE and runners.duels[-1:] == [SHAPE]:
            died["mlx_rows"] += 1
            raise RuntimeError("out of memory")
        return truth(shape, plan)

    runners = FakeRunners(seconds)
    summary = tune(store, DEVICE, BUCKETS, budget_s=1e4, runners=runners)
    assert summary.failed == [(BUCKETS[1], f"mlx_rows itself failed: {NO_MEMORY}")]
    assert died["mlx_rows"] == 1
    assert {e["stage"] for e in store.evidence(BUCKETS[1])} == {"cut"}


def test_everything_about_it_can_be_rebuilt(store: Store) -> None:
    tuned(store)
    before = store.plans(), reason(store)
    store.rebuild()
    assert (store.plans(), reason(store)) == before
    assert store.check()["ok"]


def test_a_stored_baseline_is_one_of_mlx(store: Store) -> None:
    tuned(store)
    store._db.execute("UPDATE plan SET baseline = 'single'")
    assert not store.check()["ok"]
    store.rebuild()
    assert store.check()["ok"]


# --- a verdict -----------------------------------------------------------------------------------


def test_a_duel_without_any_path_of_mlx_decides_nothing() -> None:
    fast = Measurement(SHAPE, SINGLE, rounds=8, ratio=2.0, ratio_low=1.9, ratio_high=2.1)
    failed = Measurement(SHAPE, MLX, "error", "no memory")
    late = Measurement(SHAPE, MLX, "timeout", "late")
    rows = Measurement(SHAPE, ROWS, rounds=8, median_us=9.0, ratio=1.0)
    assert verdict([failed, fast]) is None
    assert verdict([late, rows, fast]) is None  # the budget is no reason for another baseline
    found = verdict([failed, rows, fast])
    assert found is not None
    assert found[:2] == (fast, rows)
    assert found[2].startswith("single r16 is 2x mlx_rows [1.9, 2.1]; mlx itself can't run here")


# --- serving -------------------------------------------------------------------------------------


def test_serving_says_what_a_speed_up_is_over(store: Store) -> None:
    row = tuned(store)
    policy = served(store)
    decision = policy.decide(2048, 1, 16, "bfloat16")
    assert (decision.plan, decision.baseline) == (row.plan, "mlx_rows")
    assert "x mlx_rows [" in decision.reason
    assert decision.reason.endswith("at context 2048, where mlx itself can't run")
    (step,) = (s for s in policy.explain(2048, 1, 16, "bfloat16") if s.step == "tuned")
    assert all("mlx_rows" in detail for detail in step.details)


def test_between_two_contexts_mlx_is_not_risked() -> None:
    lower, upper = Tuned(BUCKETS[0], MLX, Speedups(0.9, 0.8)), Tuned(BUCKETS[1], ROWS)
    upper = upper._replace(baseline="mlx_rows")
    middle = BUCKETS[0]._replace(context=1536)
    assert between(middle, lower, upper, 4) == ROWS
    assert between(middle, lower._replace(plan=SPLIT), upper, 4) == ROWS  # not known there
    assert path_between(0.5, lower, lower) == "mlx"
    fast = upper._replace(plan=SPLIT, speedups=Speedups(2.0, 4.0))
    assert between(middle, lower._replace(speedups=Speedups(1.0, 1.0)), fast, 4).path == "split"


# --- sharing and reports -------------------------------------------------------------------------


def test_a_shared_table_names_the_baseline(tmp_path: Path) -> None:
    def timed(plan: Plan, us: float, ratio: float) -> Measurement:
        times = (us, us, us, ratio, ratio * 0.99, ratio * 1.01, (us,) * 19)
        return Measurement(SHAPE, plan, "ok", "", 1e-3, 19, *times, executed=plan)

    software = {"mla_tuner": "0.1.0", "mlx": "0.32.4", "os": "Linux", "system": "Linux"}
    failed = Measurement(SHAPE, MLX, "error", NO_MEMORY)
    with Store(tmp_path / "t.db") as store:
        run = store.start_run(
            make_device(), kernel="0123456789abcdef", software=software, options={"seed": 0}
        )
        store.record(
            run, SHAPE.bucket, [failed], [timed(ROWS, 100.0, 1.0), timed(SPLIT, 50.0, 2.0)]
        )
        (path,) = share.export(store, tmp_path / "out")
    (bucket,) = json.loads(path.read_text())["devices"][0]["buckets"]
    assert (bucket["baseline"], bucket["baseline_us"]) == ("mlx_rows", 100.0)
    assert (bucket["speedup"], bucket["median_us"]) == (2.0, 50.0)
    assert share.check(path) == []


def test_a_report_says_what_a_speed_up_is_over(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with Store(store.path.with_name("stays.db")) as other:
        rows = [tuned(store), tuned(other, kept)]
    answer = answers.tune_answer(tuner.Summary(tuned=rows), rows, DEVICE, store.path, "")
    report.show(report.tuned(answer))
    progress = report.Progress()
    for row in rows:
        progress(tuner.BucketTuned(row.bucket, row, 1.0))
    for text in capsys.readouterr():
        assert " over mlx_rows " in text
        assert "mlx_rows is best" in text


# --- rechecks ------------------------------------------------------------------------------------


def upgraded(store: Store, seconds: Any) -> tuple[Row | None, FakeRunner, str]:
    """What revalidation makes of the longer context's winner with another MLX."""
    (row,) = (row for row in store.plans() if row.bucket == BUCKETS[1])
    new = Versions(row.kernel, "99.0", row.system)
    run = store.start_run(DEVICE, kernel=new.kernel, software={"mlx": "99.0", "system": new.system})
    runner = FakeRunner(lambda plan: seconds(SHAPE, plan))
    assert row in stale(store, DEVICE, new)
    now = revalidate(store, run, DEVICE, row, new, runner=runner, budget_s=60.0)
    found = store._db.query("SELECT reason FROM plan WHERE run = ?", [run])
    return now, runner, next((str(each["reason"]) for each in found), "")


def test_after_an_upgrade_mlx_is_tried_again(store: Store) -> None:
    old = tuned(store)
    now, runner, why = upgraded(store, truth)
    assert now is not None
    assert (now.plan, now.baseline) == (old.plan, "mlx_rows")
    assert why.endswith(f"; mlx itself can't run here: {NO_MEMORY}; compared with mlx_rows")
    assert set(runner.calls) == {MLX, ROWS, old.plan}


def test_an_upgrade_may_give_mlx_its_place_back(store: Store) -> None:
    old = tuned(store)
    now, _, why = upgraded(store, lambda shape, plan: 9e-2 if plan == MLX else truth(shape, plan))
    assert now is not None
    assert (now.plan, now.baseline) == (old.plan, "mlx")
    assert "x mlx [" in why
    assert "can't run" not in why
    before = store.plans()
    store.rebuild()
    assert store.plans() == before


def test_a_plan_that_lost_to_the_stand_in_leaves_that(store: Store) -> None:
    tuned(store)
    now, _, why = upgraded(store, kept)
    assert now is None
    (left,) = (row for row in store.plans() if row.mlx == "99.0")
    assert (left.plan, left.baseline, left.stage) == (ROWS, "mlx_rows", "refute")
    assert "did not hold" in why


def test_a_stand_in_as_the_winner_meets_the_best_rival_again(store: Store) -> None:
    old = tuned(store, kept)
    rival = store.rival(DEVICE, old)
    assert rival is not None
    assert rival.native
    here = Versions(old.kernel, old.mlx, old.system)
    runner = FakeRunner(lambda plan: kept(SHAPE, plan))
    check, duel = recheck(store, DEVICE, old, here, runner=runner, budget_s=60.0)
    assert check.result == "ok"
    assert [m.plan for m in duel] == [MLX, ROWS, rival]
