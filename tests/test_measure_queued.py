"""Races by GPU time, where samples are exact: shorter, and with fewer rounds."""

from __future__ import annotations

import pytest
from fakes import FakeRunner

from mla_tuner.evidence import MIN_ROUNDS, Measurement
from mla_tuner.measure import DUEL, QUEUED_SAMPLE_S, SEARCH, Checked, Effort, measure
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape

ROWS, SINGLE = Plan("mlx_rows"), Plan("single", 1, "r16")
SPLIT2, SPLIT4 = Plan("split", 2, "r16"), Plan("split", 4, "r16")


def run(runner: FakeRunner, *plans: Plan, effort: Effort = SEARCH) -> dict[Plan, Measurement]:
    found = measure(Shape(4096, 1, 16), plans, budget_s=1e3, runner=runner, effort=effort)
    return {m.plan: m for m in found}


def test_samples_of_gpu_time_may_be_short_and_differ_in_length() -> None:
    times = {MLX: QUEUED_SAMPLE_S, SINGLE: QUEUED_SAMPLE_S / 20}
    runner = FakeRunner(times.__getitem__, queued=True)
    run(runner, MLX, SINGLE)
    inner = dict(zip(runner.calls, runner.chains, strict=True))  # the latest of each
    assert inner[MLX] == 1
    assert inner[SINGLE] in (20, 21)


def test_a_slow_first_call_does_not_shorten_the_chain() -> None:
    """28 duels of one H200's table had timed calls one by one, up to 15 times too slow, since the
    warm call had taken milliseconds on the host.
    """
    times = {MLX: 1.0, SINGLE: QUEUED_SAMPLE_S / 20, SPLIT2: QUEUED_SAMPLE_S / 10}
    slow = {MLX: 1.1, SINGLE: 5.0, SPLIT2: 5e-3}
    runner = FakeRunner(
        lambda plan: times[plan] * (1 if plan in runner.calls[:-1] else 15),  # GPU that wakes up
        check_result=lambda plan: Checked(True, 1e-6, "", slow[plan]),
        queued=True,
    )
    times[MLX] /= 15
    run(runner, *times)
    inner = dict(zip(runner.calls, runner.chains, strict=True))
    assert inner[MLX] == 1
    assert runner.calls.count(MLX) == 1
    assert inner[SINGLE] in (20, 21)
    assert inner[SPLIT2] in (10, 11)


@pytest.mark.parametrize("queued", [False, True])
def test_a_slow_first_sample_does_not_either(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {MLX: 1e-3, SINGLE: 2e-5}
    runner = FakeRunner(times.__getitem__, queued=queued)
    sample = runner.sample

    def sampled(plan: Plan, inner: int) -> tuple[float, Plan | None]:
        first = plan not in runner.calls
        seconds, ran = sample(plan, inner)
        return seconds + first * 0.02, ran

    monkeypatch.setattr(runner, "sample", sampled)
    run(runner, MLX, SINGLE)
    inner = dict(zip(runner.calls, runner.chains, strict=True))
    assert inner[SINGLE] >= 20


def test_a_search_by_gpu_time_is_brief() -> None:
    """`mlx` is timed once where it is hopeless; what is known well enough is not timed again."""
    times = {MLX: 1.0, SINGLE: 1e-2, SPLIT2: 1.001e-2, SPLIT4: 1.05e-2, ROWS: 1.2e-2}
    found = run(FakeRunner(times.__getitem__, 1e-4, queued=True), *times)
    assert found[MLX].rounds == 1
    assert found[ROWS].rounds == 2
    assert found[SINGLE].rounds == found[SPLIT2].rounds == found[SPLIT4].rounds == MIN_ROUNDS
    assert found[SINGLE].ratio == pytest.approx(100, rel=0.01)
    noisy = run(FakeRunner(times.__getitem__, 0.02, queued=True), *times)
    assert noisy[SINGLE].rounds > MIN_ROUNDS
    wall = run(FakeRunner(times.__getitem__, 1e-4), *times)
    assert wall[MLX].rounds == 2
    assert wall[SINGLE].rounds > found[SINGLE].rounds


def test_a_duel_by_gpu_time_is_no_shorter() -> None:
    times = {MLX: 1.0, SINGLE: 1e-2}
    assert run(FakeRunner(times.__getitem__, queued=True), *times, effort=DUEL)[MLX].rounds == 6
    times = {MLX: 1.1e-2, SINGLE: 1e-2}
    found = run(FakeRunner(times.__getitem__, queued=True), *times, effort=DUEL)
    assert found[MLX].rounds == DUEL.most
