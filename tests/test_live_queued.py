"""GPU time of queued chains, and one process for all duels; on the CPU, with a stand-in clock."""

from __future__ import annotations

import os
from collections.abc import Callable

import mlx.core as mx
import pytest
from fakes import make_device

from mla_tuner import live
from mla_tuner.backends.head_start import LONGEST_S, Timed
from mla_tuner.errors import DeviceError
from mla_tuner.evidence import LATE
from mla_tuner.live import IsolatedRunners, LiveRunner, LiveRunners
from mla_tuner.measure import LateError, measure
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape

SMALL = Shape(256, 2, 3, "float32")
ROWS = Plan("mlx_rows")


class Clock:
    """Runs chains, and says that they took 4 ms; `host` says when the host is done."""

    def __init__(self, host: Callable[[float], float] = lambda wait_s: 1e-5) -> None:
        self.host, self.waits, self.shapes = host, [], []  # type: ignore[var-annotated]

    def time(self, chain: mx.array, head_start_s: float) -> Timed:
        mx.eval(chain)
        self.waits.append(head_start_s)
        self.shapes.append((chain.shape, chain.dtype))
        host_s = self.host(head_start_s)
        return Timed(4e-3, host_s, host_s < head_start_s)


def runner_with(clock: Clock) -> LiveRunner:
    runners = LiveRunners(make_device())
    runners.clock = clock  # type: ignore[assignment]
    return runners(SMALL, 0)


@pytest.mark.parametrize("plan", [MLX, ROWS], ids=str)
def test_a_sample_is_what_the_clock_says(plan: Plan) -> None:
    clock = Clock()
    runner = runner_with(clock)
    assert runner.queued
    assert runner.check(plan).ok
    assert runner.sample(plan, 4) == (1e-3, plan)
    assert clock.shapes == [((2, 3, 1, 512), mx.float32)]  # one that has the queries' shape


def test_the_head_start_follows_from_how_long_the_host_takes() -> None:
    clock = Clock(lambda wait_s: 6e-3)
    runner = runner_with(clock)
    runner.sample(MLX, 4)
    assert clock.waits[-1] > 6e-3
    assert len(clock.waits) > 1  # the first ones were too short, and their samples are thrown away
    assert clock.waits == sorted(clock.waits)
    clock.waits.clear()
    runner.sample(MLX, 8)
    assert clock.waits == [pytest.approx(1.5 * 12e-3, rel=0.02)]  # twice the calls
    clock.waits.clear()
    runner.sample(ROWS, 4)
    assert len(clock.waits) > 1  # another plan may take longer


def test_a_host_that_is_never_ahead_makes_no_sample_and_is_not_waited_for_for_ever() -> None:
    clock = Clock(lambda wait_s: wait_s + 1e-3)
    runner = runner_with(clock)
    with pytest.raises(LateError, match=f"^{LATE}: the last chain took it"):
        runner.sample(MLX, 1)
    assert len(clock.waits) == live.TRIES
    assert max(clock.waits) > LONGEST_S  # no head start would have done
    found = measure(SMALL, [MLX, ROWS], budget_s=20.0, runner=runner)
    assert [(m.status, m.late, m.samples_us) for m in found] == [("timeout", True, ())] * 2


def test_what_the_host_has_read_is_kept_from_being_used_again() -> None:
    runner = runner_with(Clock())
    runner.check(MLX)
    assert [array is None for array in runner._read] == [False, True]
    plain = LiveRunners(make_device())(SMALL, 0)
    plain.check(MLX)
    assert (plain.queued, plain._read) == (False, [])


def test_the_queue_of_a_gpu_holds_whole_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in live.WHOLE_CHAINS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(live, "use", lambda device: None)
    LiveRunners(make_device())
    assert not set(live.WHOLE_CHAINS) & set(os.environ)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    LiveRunners(make_device(132, "cuda"))
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"  # who sets it means it
    assert int(os.environ["MLX_MAX_MB_PER_BUFFER"]) > 10**5


# --- duels ---------------------------------------------------------------------------------------


class CudaHost(live._Host):
    """The other process, with the CPU in the place of a GPU."""

    def __init__(self, device: object) -> None:
        super().__init__(make_device())

    def compiled(self) -> tuple[tuple[str, float], ...]:
        return (("mla_small", 1.5),)

    def sample(self, what: tuple[Shape, int], plan: Plan, inner: int) -> tuple[float, Plan | None]:
        if plan.native:
            os._exit(3)
        return float(os.getpid()), plan


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> IsolatedRunners:
    monkeypatch.setattr(live, "_Host", CudaHost)
    return IsolatedRunners(make_device(132, "cuda"))


def test_duels_on_cuda_share_a_process_that_is_not_the_search(gpu: IsolatedRunners) -> None:
    with gpu:
        search, _ = gpu(SMALL, 0).sample(MLX, 1)
        found = []
        for shape in (SMALL, Shape(128, 1, 2, "float32"), SMALL):
            with gpu.fresh(shape, 0) as runner:
                assert runner.check(MLX).ok
                found.append(runner.sample(MLX, 1)[0])
        assert len(set(found)) == 1
        assert search not in (found[0], float(os.getpid()))
        assert gpu.compiled() == [("mla_small", 1.5)] * 2
        assert gpu.ready() == gpu.compiled()
    assert gpu.compiled() == []


def test_a_crash_in_a_duel_costs_the_next_one_a_new_process(gpu: IsolatedRunners) -> None:
    with gpu:
        with gpu.fresh(SMALL, 0) as runner:
            first = runner.sample(MLX, 1)[0]
            with pytest.raises(DeviceError, match="the process of the duel died"):
                runner.sample(Plan("single"), 1)
        with gpu.fresh(SMALL, 0) as runner:
            assert runner.sample(MLX, 1)[0] != first


def test_memory_is_not_kept_in_two_processes(gpu: IsolatedRunners) -> None:
    told: list[str] = []

    class Watched:
        alive = True

        def __init__(self, name: str) -> None:
            self.name = name

        def call(self, method: str, *args: object) -> None:
            told.append(f"{method} {self.name}")

        def close(self) -> None:
            raise AssertionError("nothing failed")

    gpu._worker, gpu._duels = Watched("search"), Watched("duel")  # type: ignore[assignment]
    with gpu.fresh(SMALL, 0):
        told.append("duel")
    assert told == ["make_room search", "duel", "make_room duel"]


@pytest.mark.usefixtures("kernel")
def test_elsewhere_each_duel_has_its_own_process_and_its_kernels_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_Host", CudaHost)
    with IsolatedRunners(make_device()) as runners:
        pids = set()
        for _ in range(2):
            with runners.fresh(SMALL, 0) as runner:
                pids.add(runner.sample(MLX, 1)[0])
        assert len(pids) == 2
        assert runners.compiled() == [("mla_small", 1.5)] * 2
        assert runners.ready() == []  # their processes have ended


def test_a_process_that_cannot_start_measures_no_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with IsolatedRunners(make_device(132, "cuda")) as runners:
        assert not runners.queued()
        runner = runners(SMALL, 0)
        assert not runner.queued
        assert [m.status for m in measure(SMALL, [MLX], budget_s=9.0, runner=runner)] == ["error"]


class OtherClock(CudaHost):
    """A process that times by another clock than the run does."""

    def queued(self) -> bool:
        return True


def test_a_duel_by_another_clock_than_the_search_is_an_error(gpu: IsolatedRunners) -> None:
    with gpu:
        assert not gpu.queued()
        gpu._duels._made_of = (OtherClock, (gpu.device,))
        with gpu.fresh(SMALL, 0) as runner:
            assert not runner.queued
            (found,) = measure(SMALL, [MLX], budget_s=9.0, runner=runner)
        assert (found.status, found.samples_us) == ("error", ())
        expected = "this process times by the GPU's clock, where the run times from outside"
        assert found.message == expected
        gpu._duels.close()
        gpu._worker._made_of, gpu._duels._made_of = gpu._duels._made_of, gpu._worker._made_of
        gpu._worker.close()
        gpu._gpu_time = None
        assert gpu.queued()
        with gpu.fresh(SMALL, 0) as runner:
            assert runner.queued
            with pytest.raises(DeviceError, match="times from outside, where the run times by the"):
                runner.check(MLX)


def test_here_nothing_is_queued() -> None:
    with IsolatedRunners(make_device()) as runners:
        assert not runners.queued()
        assert not runners(SMALL, 0).queued
