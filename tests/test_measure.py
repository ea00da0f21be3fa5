from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeRunner

from mla_tuner import measure
from mla_tuner.errors import BusyError
from mla_tuner.evidence import Measurement, finalist, median_interval
from mla_tuner.measure import (
    DUEL,
    FULL,
    LONGEST_PAUSE_S,
    PAUSE_S,
    SAMPLE_S,
    SEARCH,
    Checked,
    Effort,
    machine_lock,
)
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape

SHAPE = Shape(4096, 1, 16)
ROWS, SINGLE = Plan("mlx_rows"), Plan("single", 1, "r16")
SPLIT2, SPLIT4 = Plan("split", 2, "r16"), Plan("split", 4, "r16")
TIMES = {MLX: 10e-3, ROWS: 9.9e-3, SINGLE: 8e-3, SPLIT2: 7.9e-3, SPLIT4: 2e-3}


def run(
    runner: FakeRunner, *plans: Plan, budget_s: float = 1e3, effort: Effort = FULL, seed: int = 0
) -> dict[Plan, Measurement]:
    told: list[Measurement] = []
    found = measure.measure(
        SHAPE,
        plans or list(TIMES),
        budget_s=budget_s,
        runner=runner,
        progress=told.append,
        effort=effort,
        seed=seed,
    )
    assert [m.plan for m in found] == list(plans or TIMES)
    assert Counter(m.plan for m in told) == Counter(m.plan for m in found)
    return {m.plan: m for m in found}


def test_times_and_ratios_are_those_of_the_device() -> None:
    found = run(FakeRunner(TIMES.__getitem__, noise=0.02))
    for plan, m in found.items():
        assert (m.status, m.executed) == ("ok", plan)
        assert m.median_us == pytest.approx(TIMES[plan] * 1e6, rel=0.05)
        assert m.p10_us is not None
        assert m.p90_us is not None
        assert m.p10_us <= m.median_us <= m.p90_us
        assert m.ratio == pytest.approx(TIMES[MLX] / TIMES[plan], rel=0.05)
        assert m.ratio_low is not None
        assert m.ratio_high is not None
        assert m.ratio_low <= m.ratio <= m.ratio_high
        assert m.rounds == len(m.samples_us)
    assert found[MLX].ratio == 1.0


def test_ratios_do_not_see_a_clock_that_slows_down() -> None:
    """Every round is slower than the one before: medians of different rounds would lie."""
    runner = FakeRunner(TIMES.__getitem__, drift=lambda now: 1 + now)
    found = run(runner, MLX, SINGLE)
    assert found[SINGLE].ratio == pytest.approx(1.25, rel=0.02)


def test_each_round_is_shuffled_and_holds_every_plan() -> None:
    runner = FakeRunner(lambda plan: 20e-3)
    run(runner, MLX, ROWS, SINGLE, effort=Effort(6, 12))
    rounds = [
        tuple(runner.calls[i : i + 3]) for i in range(6, len(runner.calls), 3)
    ]  # after two warm-ups each
    assert all(set(r) == {MLX, ROWS, SINGLE} for r in rounds)
    assert len(set(rounds)) > 2


def test_cheap_plans_are_chained_until_a_sample_is_long_enough() -> None:
    runner, cheapest = (FakeRunner(lambda plan, s=s: s) for s in (SAMPLE_S / 10, SAMPLE_S / 1e6))
    run(runner, MLX)
    assert runner.chains[0] == 1
    assert set(runner.chains[1:]) <= {10, 11}
    run(cheapest, MLX)
    assert max(cheapest.chains) == measure.MAX_INNER


def test_an_expensive_plan_is_not_warmed_up_twice() -> None:
    slow = FakeRunner(lambda plan: 1.0, check_result=lambda plan: Checked(True, 0.0, "", 1.0))
    run(slow, MLX, SINGLE, effort=Effort(6, 6))
    assert Counter(slow.calls) == {MLX: 6, SINGLE: 6}


def test_plans_just_above_and_below_the_sample_time_share_the_wait_alike() -> None:
    """Each chain ends with a wait: a plan of 0.99 ms must not seem far ahead of one of 1.01 ms."""

    class Waiting(FakeRunner):
        def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
            seconds, executed = super().sample(plan, inner)
            return seconds + 1e-4 / inner, executed

    times = {MLX: 0.91e-3, SINGLE: 0.89e-3}
    found = run(Waiting(times.__getitem__), *times, effort=DUEL)
    assert found[MLX].inner == found[SINGLE].inner
    assert found[SINGLE].ratio == pytest.approx(0.91 / 0.89, rel=0.01)


def test_a_cold_start_does_not_decide_the_chains() -> None:
    """A process's first call loads and compiles; the plan that meets it must not pay ever after."""

    class Cold(FakeRunner):
        def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
            seconds, executed = super().sample(plan, inner)
            cold = 5e-3 if len(self.calls) == 1 else 0.0
            return seconds + (1e-4 + cold) / inner, executed

    found = run(Cold(lambda plan: 3e-4), MLX, Plan("mlx_rows"), effort=DUEL)
    assert found[MLX].inner == found[Plan("mlx_rows")].inner > 1
    assert found[Plan("mlx_rows")].ratio == pytest.approx(1.0, abs=0.01)


# --- who leaves, and when --------------------------------------------------------------------


def test_a_far_slower_mlx_is_timed_no_more_than_its_interval_needs() -> None:
    times = {MLX: 1.0, SINGLE: 0.0101, SPLIT2: 0.01}
    runner = FakeRunner(times.__getitem__)
    found = run(runner, *times)
    assert found[MLX].rounds == 6
    assert found[SPLIT2].rounds == FULL.least
    assert found[SPLIT2].ratio_low == pytest.approx(100)
    search = run(FakeRunner(times.__getitem__), *times, effort=SEARCH)
    assert search[MLX].rounds == 2
    assert search[SPLIT2].rounds >= 6


def test_in_a_search_losers_leave_by_rank() -> None:
    times = {MLX: 1.0, SINGLE: 0.9, SPLIT2: 0.8, SPLIT4: 0.1}
    times = {plan: seconds / 100 for plan, seconds in times.items()}
    times[SPLIT4] = 0.0075
    found = run(FakeRunner(times.__getitem__, noise=0.003), *times, effort=SEARCH)
    assert found[SPLIT4].rounds >= SEARCH.least
    assert found[SINGLE].rounds == found[SPLIT2].rounds == 6
    assert found[MLX].rounds == found[SPLIT4].rounds  # the canary stays while the race is close
    kept = run(FakeRunner(times.__getitem__, noise=0.003), *times)
    (rounds,) = {m.rounds for m in kept.values()}
    assert rounds > FULL.least


def test_a_race_that_is_over_ends() -> None:
    found = run(FakeRunner({MLX: 1.0, SPLIT2: 0.01}.__getitem__), MLX, SPLIT2)
    assert found[MLX].rounds == found[SPLIT2].rounds == 6


def test_a_loser_that_may_still_tie_stays_in_the_search() -> None:
    """1 % behind for sure, with fewer partitions: the one to take, if it isn't thrown out first."""
    times = {MLX: 10e-3, SPLIT2: 7.07e-3, SPLIT4: 7e-3, SINGLE: 7.5e-3}
    found = run(FakeRunner(times.__getitem__, noise=0.001), *times, effort=SEARCH)
    assert found[SPLIT2].rounds == found[SPLIT4].rounds >= SEARCH.least
    assert found[SINGLE].rounds < found[SPLIT4].rounds
    winner = finalist(list(found.values()))
    assert winner is not None
    assert winner.plan == SPLIT2


def test_a_settled_race_stops_by_the_clock_not_by_the_score() -> None:
    effort = Effort(6, 61, seconds=1.0)
    assert run(FakeRunner(lambda plan: 10e-3), MLX, SINGLE, effort=effort)[MLX].rounds == 50
    assert run(FakeRunner(lambda plan: 1.0), MLX, SINGLE, effort=effort)[MLX].rounds == 6
    assert run(FakeRunner(lambda plan: 2e-3), MLX, SINGLE, effort=effort)[MLX].rounds == 61


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("seconds", "width", "limit_s"),
    [(5e-6, 0.03, 2.0), (1e-3, 0.03, 2.0), (50e-3, 0.05, 12.0), (0.5, 0.10, 25.0)],
)
def test_a_duel_of_cheap_and_of_expensive_plans_gets_a_tight_interval(
    seconds: float, width: float, limit_s: float, seed: int
) -> None:
    """A timer that is off by up to 1 us, and 3 % noise from sample to sample."""

    class Jittery(FakeRunner):
        def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
            took, executed = super().sample(plan, inner)
            return took + self.rng.uniform(0.0, 1e-6) / inner, executed

    warm = Checked(True, 1e-6, "", seconds)
    runner = Jittery(lambda plan: seconds, 0.03, check_result=lambda plan: warm, seed=seed)
    found = run(runner, MLX, SINGLE, effort=DUEL, seed=seed)
    low, high = found[SINGLE].ratio_low, found[SINGLE].ratio_high
    assert low is not None
    assert high is not None
    assert high - low < width
    assert low - width < 1.0 < high + width
    assert runner.clock < limit_s
    assert found[SINGLE].rounds >= DUEL.least
    samples_s = found[SINGLE].inner * seconds
    assert samples_s >= min(SAMPLE_S, measure.MAX_INNER * seconds)


def test_a_first_sample_that_is_slow_does_not_make_all_samples_short() -> None:
    class Warming(FakeRunner):
        def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
            seconds, executed = super().sample(plan, inner)
            return seconds * (20 if len(self.calls) == 1 else 1), executed

    found = run(Warming(lambda plan: SAMPLE_S / 40), MLX)
    assert found[MLX].inner == 40


# --- drift -----------------------------------------------------------------------------------


def test_a_round_with_a_straying_canary_is_dropped() -> None:
    runner = FakeRunner(lambda plan: 20e-3)
    spikes = iter([1.0] * 8 + [1.5, 1.5] + [1.0] * 100)
    runner.drift = lambda now: next(spikes)
    found = run(runner, MLX, SINGLE, effort=Effort(6, 8))
    assert len(runner.paused) == 1
    assert found[MLX].message == found[SINGLE].message == "1 round dropped: mlx drifted"
    assert set(found[MLX].samples_us) == {20e3}
    assert found[MLX].rounds == 8
    for m in found.values():
        assert (m.dropped, m.paused_s) == (1, PAUSE_S)


def test_a_lasting_change_of_clock_is_accepted() -> None:
    runner = FakeRunner(lambda plan: 20e-3, drift=lambda now: 1.0 if now < 0.2 else 1.4)
    found = run(runner, MLX, SINGLE)
    assert found[MLX].rounds > FULL.least
    assert 1 <= len(runner.paused) <= 4
    assert found[SINGLE].ratio == pytest.approx(1.0)


def test_pauses_grow_while_the_drift_lasts_and_count_on_the_clock() -> None:
    """A canary that gets slower and slower: no level of it is the usual one."""
    runner = FakeRunner(lambda plan: 20e-3)
    rounds = iter([1.0] * 12 + [1.1 ** (i // 2) for i in range(200)])
    runner.drift = lambda now: next(rounds)
    effort = Effort(6, 40, seconds=30.0, least=12)
    found = run(runner, MLX, SINGLE, effort=effort)
    first = [PAUSE_S * 2**i for i in range(5)]
    assert runner.paused[:5] == pytest.approx(first)
    assert max(runner.paused) <= LONGEST_PAUSE_S
    assert found[MLX].paused_s == found[SINGLE].paused_s == pytest.approx(sum(runner.paused))
    assert found[MLX].dropped == len(runner.paused)


@pytest.mark.parametrize("budget_s", [0.5, 1e3])
def test_pauses_end_with_the_budget_and_the_time_of_the_race(budget_s: float) -> None:
    runner = FakeRunner(lambda plan: 1e-3, noise=0.5)
    effort = Effort(6, 400, seconds=0.4, least=200)
    found = run(runner, MLX, SINGLE, effort=effort, budget_s=budget_s)
    assert found[MLX].paused_s <= min(effort.seconds, budget_s) + 1e-9
    assert runner.clock < budget_s + 5e-3
    assert found[MLX].status == "ok"


def test_an_ever_restless_machine_still_gets_an_answer() -> None:
    found = run(FakeRunner(lambda plan: 20e-3, noise=0.5), MLX, SINGLE, effort=Effort(6, 12))
    assert found[MLX].rounds == 12
    assert "rounds dropped" in found[MLX].message


def test_drift_cannot_turn_a_race_that_is_not_close() -> None:
    runner = FakeRunner({MLX: 1.0, SPLIT2: 0.01}.__getitem__, noise=0.3)
    run(runner, MLX, SPLIT2)
    assert runner.paused == []


# --- faults ----------------------------------------------------------------------------------


def check_result(plan: Plan) -> Checked:
    if plan == SINGLE:
        return Checked(False, 0.3, "row error 3.0e-01 exceeds 2.5e-03", 1e-3)
    if plan == SPLIT2:
        raise RuntimeError("Unable to allocate\n9 GB")
    return Checked(True, 1e-3, "", 1e-3)


def test_wrong_and_failing_plans_are_never_timed() -> None:
    runner = FakeRunner(TIMES.__getitem__, check_result=check_result)
    found = run(runner)
    assert (found[SINGLE].status, found[SINGLE].max_error) == ("wrong", 0.3)
    assert found[SINGLE].message == "row error 3.0e-01 exceeds 2.5e-03"
    assert found[SPLIT2].status == "error"
    assert found[SPLIT2].message == "RuntimeError: Unable to allocate 9 GB"
    assert not {SINGLE, SPLIT2} & set(runner.calls)
    assert found[SPLIT4].status == "ok"


@pytest.mark.parametrize("executed", [None, SPLIT4, Plan("split", 2, "r32"), MLX])
def test_a_plan_that_did_not_run_as_asked_is_an_error(executed: Plan | None) -> None:
    runner = FakeRunner(
        TIMES.__getitem__, executed=lambda plan: executed if plan == SPLIT2 else plan
    )
    found = run(runner, MLX, SPLIT2)
    assert found[SPLIT2].status == "error"
    assert found[SPLIT2].message == f"asked for split x2 r16, but {executed or 'nothing'} ran"
    assert found[SPLIT2].ratio is None
    assert found[MLX].status == "ok"


def test_a_plan_without_tile_runs_with_the_default_one() -> None:
    plan = Plan("split", 2)
    runner = FakeRunner(lambda plan: 1e-2, executed=lambda plan: SPLIT2 if plan.native else plan)
    found = run(runner, MLX, plan)
    assert (found[plan].status, found[plan].executed) == ("ok", SPLIT2)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_an_error(seconds: float) -> None:
    found = run(FakeRunner(lambda plan: seconds if plan == SINGLE else 1e-2), MLX, SINGLE, SPLIT2)
    assert found[SINGLE].status == "error"
    assert "the clock gave" in found[SINGLE].message
    assert found[SPLIT2].status == "ok"


def test_a_plan_that_fails_half_way_leaves_no_times() -> None:
    def seconds(plan: Plan) -> float:
        if plan == SINGLE and runner.calls.count(SINGLE) > 4:
            raise MemoryError
        return 1e-2

    runner = FakeRunner(seconds)
    found = run(runner, MLX, SINGLE)
    assert (found[SINGLE].status, found[SINGLE].message) == ("error", "MemoryError")
    assert (found[SINGLE].rounds, found[SINGLE].samples_us) == (0, ())
    assert found[MLX].rounds == 6


def test_without_mlx_there_are_times_but_no_ratios() -> None:
    def failing(plan: Plan) -> Checked:
        if plan == MLX:
            raise MemoryError("1M tokens")
        return Checked(True, 0.0, "", 1e-3)

    found = run(FakeRunner(TIMES.__getitem__, check_result=failing))
    assert found[MLX].status == "error"
    assert found[SPLIT4].median_us == pytest.approx(2e3)
    assert found[SPLIT4].ratio is None
    assert run(FakeRunner(TIMES.__getitem__), SINGLE)[SINGLE].ratio is None


def test_the_budget_ends_everything() -> None:
    runner = FakeRunner(TIMES.__getitem__, check_result=lambda plan: Checked(True, 0.0, "", 0.4))
    found = run(runner, budget_s=1.0)
    assert [m.status for m in found.values()] == ["timeout"] * len(TIMES)
    assert "budget" in found[MLX].message
    assert runner.clock < 1.0 + 0.4 + 0.02
    assert run(FakeRunner(TIMES.__getitem__), budget_s=0.0)[MLX].status == "timeout"
    some = run(FakeRunner(lambda plan: 0.1), MLX, SINGLE, budget_s=1.0)
    assert some[MLX].status == "ok"
    assert some[MLX].rounds < 6
    assert some[MLX].ratio_low is None


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(plan: Plan) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(FakeRunner(interrupted), MLX)


def test_no_plans_no_measurements() -> None:
    runner = FakeRunner(TIMES.__getitem__)
    assert measure.measure(SHAPE, [], budget_s=1.0, runner=runner) == []


# --- the machine's lock ----------------------------------------------------------------------

HOLD = "import sys, time; from mla_tuner.measure import machine_lock\nwith machine_lock():\n"


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("own_lock")
def test_the_lock_is_free_again_after_use() -> None:
    for _ in range(2):
        with machine_lock(), pytest.raises(BusyError, match="another process"), machine_lock():
            pass
    with pytest.raises(RuntimeError), machine_lock():
        raise RuntimeError
    with machine_lock():
        pass


@pytest.mark.usefixtures("own_lock")
def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = HOLD + "    print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={"TMPDIR": str(tmp_path)}
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError), machine_lock():
            pass
        holder.kill()
    with machine_lock():
        pass


@pytest.mark.usefixtures("own_lock")
def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mla-tuner.lock").symlink_to(tmp_path / "target")
    with pytest.raises(BusyError, match="cannot open the lock file"), machine_lock():
        pass
    assert not (tmp_path / "target").exists()


@pytest.mark.usefixtures("own_lock")
def test_the_lock_serves_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with machine_lock():
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "mla-tuner.lock").stat().st_mode) == 0o666


@pytest.mark.usefixtures("own_lock")
def test_a_lock_of_another_user_is_opened_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux refuses O_CREAT on it in a shared folder (fs.protected_regular)."""
    with machine_lock():
        pass
    really = os.open

    def protected(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", protected)
    with machine_lock():
        pass


@pytest.mark.usefixtures("own_lock")
def test_two_that_make_the_lock_at_once_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def beaten(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            os.close(really(path, os.O_WRONLY | os.O_CREAT, mode))
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", beaten)
    with machine_lock(), pytest.raises(BusyError, match="another process"), machine_lock():
        pass


def test_intervals_are_those_of_the_paired_ratios() -> None:
    found = run(FakeRunner(TIMES.__getitem__, noise=0.05), MLX, SINGLE)
    mlx, single = (found[p].samples_us for p in (MLX, SINGLE))
    ratios = [a / b for a, b in zip(mlx, single, strict=True)]
    interval = (found[SINGLE].ratio_low, found[SINGLE].ratio_high)
    assert median_interval(ratios) == pytest.approx(interval)
