"""The real device: cold rings, the memory they may take, and the fresh process of the duel."""

from __future__ import annotations

import os
import signal

import mlx.core as mx
import pytest
from fakes import make_device

from mla_tuner import live
from mla_tuner.device import GB
from mla_tuner.errors import DeviceError
from mla_tuner.evidence import Measurement
from mla_tuner.live import IsolatedRunners, LiveRunner, LiveRunners, LostError
from mla_tuner.measure import Effort, measure
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import GEOMETRIES, Geometry, Shape

SHAPE = Shape(4096, 1, 16)
SMALL = Shape(256, 2, 3, "float32")
SINGLE = Plan("single", 1, "r16")
PATHS = [MLX, Plan("mlx_rows"), Plan("single"), Plan("split", 2)]


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the memory of `make_device` is free, whatever this machine has."""
    monkeypatch.setattr(live, "free_bytes", lambda device: device.memory_gb * GB)


def test_a_ring_covers_the_cache_three_times_within_a_quarter_of_memory() -> None:
    runners = LiveRunners(make_device())
    pool = runners.pool_for(SHAPE)
    ring = pool.ring(SHAPE)
    assert (ring + 1) * SHAPE.cache_bytes >= 3 * (32 << 20)
    assert runners.pool_for(Shape(1024, 2, 128)) is pool
    assert runners.pool_for(Shape(1024, 2, 128, "float16")) is not pool
    with pytest.raises(MemoryError, match=r"9\.0 GiB; no more than 6\.0 may be taken, a quarter"):
        runners.pool_for(Shape(1 << 20, 8, 16))


def test_a_ring_is_no_larger_than_half_of_what_others_leave_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU that a server has filled."""
    monkeypatch.setattr(live, "free_bytes", lambda device: 80 << 20)
    runners = LiveRunners(make_device())  # of which 96 MB would make it cold
    shape = Shape(4096, 1, 16, "float16")
    assert (runners.pool_for(shape).ring(shape) + 1) * shape.cache_bytes < 50 << 20
    with pytest.raises(MemoryError, match="half of what was free"):
        runners.pool_for(Shape(1 << 16, 1, 16))


def test_a_ring_is_no_longer_than_the_first_case_takes_to_be_cold() -> None:
    """The pool of a long context would hold thousands of short ones."""
    runners = LiveRunners(make_device())
    long, short = Shape(1 << 17, 1, 4), Shape(1024, 1, 4)
    pool = runners.pool_for(long)
    assert runners.ring(long) == 1
    assert runners.pool_for(short) is pool
    assert pool.ring(short) > 100
    assert runners.ring(short) == -(-3 * (32 << 20) // short.cache_bytes) + 1
    runner = runners(short, 0)
    for _ in range(100):
        runner._next()
    assert len(runner._ring) == runners.ring(short)


def test_a_shape_that_does_not_fit_in_memory_is_an_error_for_every_plan() -> None:
    shape = Shape(1 << 20, 8, 16)
    runner = LiveRunners(make_device())(shape, 0)
    found = measure(shape, [MLX, SINGLE], budget_s=1.0, runner=runner)
    assert [m.status for m in found] == ["error", "error"]
    assert "the cache takes 9.0 GiB" in found[0].message


def test_a_plan_that_fails_leaves_its_memory_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LiveRunners(make_device())(SMALL, 0)

    def greedy(*args: object) -> None:
        scratch = mx.zeros((1 << 22,))
        mx.eval(scratch)
        raise RuntimeError("out of memory")

    for name, call in (("_check", runner.check), ("_timed", lambda plan: runner.sample(plan, 1))):
        monkeypatch.setattr(runner, name, greedy)
        mx.clear_cache()
        before = mx.get_active_memory()
        with pytest.raises(RuntimeError, match="out of memory"):
            call(MLX)
        assert mx.get_active_memory() + mx.get_cache_memory() <= before


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["paged", "dense"])
@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[1]], ids=str)
def test_every_path_of_the_cpu_runs_as_asked(layout: str, geometry: Geometry) -> None:
    shape = Shape(256, 2, 3, "float32", geometry, 2, layout)
    runner = LiveRunners(make_device())(shape, 0)
    check(measure(shape, PATHS, budget_s=60.0, runner=runner, effort=Effort(1, 1)))


def check(found: list[Measurement]) -> None:
    assert [m.message for m in found] == [""] * 4
    assert [m.status for m in found] == ["ok"] * 4
    for m in found:
        assert m.executed is not None
        assert (m.executed.path, m.executed.partitions) == (m.plan.path, m.plan.partitions)
        assert m.max_error is not None
        assert m.max_error < 2e-3
        assert m.median_us is not None
        assert m.median_us > 0


def test_sampled_rows_touch_every_tile() -> None:
    runners = LiveRunners(make_device())
    for heads, q_len in ((1, 1), (3, 1), (5, 3), (16, 1), (63, 2), (128, 8)):
        rows = runners(Shape(1024, 1, heads, q_len=q_len), 3)._rows()  # type: ignore[attr-defined]
        assert {row // 8 for row in rows} == set(range(-(-heads * q_len // 8)))
        assert rows[-1] == heads * q_len - 1


# --- the process of the duel -------------------------------------------------------------------


CRASH = Plan("split", 64, "r16")


class DeadlyHost(live._Host):
    """Where a call is made that ends its process, or never ends."""

    def sample(self, what: tuple[Shape, int], plan: Plan, inner: int) -> tuple[float, Plan | None]:
        if plan == CRASH:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().sample(what, plan, inner)

    def make_room(self) -> None:
        raise MemoryError("no room to make room")


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_Host", DeadlyHost)


@pytest.mark.usefixtures("kernel", "deadly")
def test_a_search_beside_this_process_survives_what_crashes_it() -> None:
    with IsolatedRunners(make_device()) as runners:
        runner = runners(SMALL, 0)
        check(measure(SMALL, PATHS, budget_s=60.0, runner=runner, effort=Effort(1, 1)))
        with pytest.raises(DeviceError, match=r"^the process of the search died \(signal 11\)$"):
            runner.sample(CRASH, 1)
        other = Shape(128, 1, 2, "float32")
        for shape in (SMALL, other, SMALL):
            assert runners(shape, 0).check(MLX).ok
        with runners.fresh(other, 0) as duel:
            assert duel.sample(MLX, 1)[0] > 0


def test_no_process_is_started_to_free_nothing() -> None:
    with IsolatedRunners(make_device()) as runners, runners.fresh(SMALL, 0):
        assert not runners._worker.alive


@pytest.mark.usefixtures("deadly")
def test_room_that_cannot_be_made_ends_the_process_that_takes_it() -> None:
    with IsolatedRunners(make_device()) as runners:
        assert runners(SMALL, 0).check(MLX).ok
        with runners.fresh(SMALL, 0) as duel:
            assert not runners._worker.alive
            assert duel.check(MLX).ok


@pytest.mark.usefixtures("kernel")
def test_a_fresh_process_runs_every_path_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    runners = LiveRunners(make_device())
    with runners.fresh(SMALL, 0) as runner:
        check(measure(SMALL, PATHS, budget_s=60.0, runner=runner, effort=Effort(1, 1)))
        assert runner.now() == pytest.approx(runners.now(), abs=10.0)  # one clock for budgets
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("deadly")
def test_a_death_is_the_status_of_the_plan_it_met_and_the_race_goes_on() -> None:
    with LiveRunners(make_device()).fresh(SMALL, 0) as runner:
        sample, left = runner.sample, [6]

        def deadly(plan: Plan, inner: int) -> tuple[float, Plan | None]:
            left[0] -= plan != MLX
            return sample(plan if plan == MLX or left[0] else CRASH, inner)

        runner.sample = deadly  # type: ignore[method-assign]
        effort = Effort(6, 6)
        mlx, rows = measure(SMALL, PATHS[:2], budget_s=60.0, runner=runner, effort=effort)
    assert (rows.status, rows.samples_us) == ("error", ())
    assert rows.message == "the process of the duel died (signal 11)"
    assert (mlx.status, mlx.rounds) == ("ok", 6)


class PoisonedHost(live._Host):
    """Where `mlx_rows` leaves the device unusable, as an illegal access of CUDA does."""

    def sample(self, what: tuple[Shape, int], plan: Plan, inner: int) -> tuple[float, Plan | None]:
        if plan == PATHS[1]:
            live._free_scratch = LiveRunner._call = illegal_access  # type: ignore[assignment,method-assign]
        return super().sample(what, plan, inner)


def illegal_access(*args: object) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_process_that_lost_the_device_ends_with_the_plan_that_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_Host", PoisonedHost)
    with IsolatedRunners(make_device()) as runners:
        runner = runners(SMALL, 0)
        rows, mlx = measure(
            *(SMALL, PATHS[1::-1]), budget_s=60.0, runner=runner, effort=Effort(6, 6)
        )
        assert rows.status == "error"
        text = "the device was lost: RuntimeError: an illegal memory access was encountered"
        assert rows.message == text
        assert (mlx.status, mlx.rounds) == ("ok", 6)
        with pytest.raises(LostError, match=text):
            runner.sample(PATHS[1], 1)
        assert not runners._worker.alive


def test_where_no_process_can_be_started_each_plan_says_so(monkeypatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with LiveRunners(make_device()).fresh(SMALL, 0) as runner:
        found = measure(SMALL, PATHS[:2], budget_s=60.0, runner=runner)
    assert [m.status for m in found] == ["error", "error"]
    assert "No such file or directory: '/nowhere/python'" in found[0].message


def test_the_memory_of_a_long_context_is_free_before_the_duel() -> None:
    runners = LiveRunners(make_device())
    short, long = Shape(1024, 1, 4), Shape(1 << 17, 1, 4)
    pool = runners.pool_for(short)
    with runners.fresh(short, 0):
        assert runners.pool_for(short) is pool
    pool = runners.pool_for(long)
    with runners.fresh(long, 0):
        assert runners._pool is None
