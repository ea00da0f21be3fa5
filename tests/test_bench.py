"""Benchmark rows, on a simulated and on the real device."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeBackend, FakeRunners, make_device
from test_live import CRASH, DeadlyHost

from mla_tuner import bench, live
from mla_tuner.device import probe
from mla_tuner.evidence import Measurement
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.words import counted

KEYS = [
    *("shape", "path", "partitions", "tile", "median_us", "p10_us", "p90_us", "ratio_to_mlx"),
    *("gb_per_s", "gflop_per_s", "max_error", "executed", "clock"),
]
SHAPE = Shape(4096, 1, 16)


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRunners:
    """A device on which mlx takes 9 ms, and more partitions are faster."""
    runners = FakeRunners(lambda shape, plan: 9e-3 if plan == MLX else 1e-3 / plan.partitions)
    monkeypatch.setattr(bench, "IsolatedRunners", lambda device: runners)
    monkeypatch.setattr(bench.backends, "get", lambda name: FakeBackend())
    return runners


def paths(plans: list[Plan]) -> list[str]:
    return [plan.path for plan in plans]


def test_one_plan_a_path_by_default(fake: FakeRunners) -> None:
    plans = bench.plans_for(SHAPE, make_device())
    assert sorted(paths(plans)) == ["mlx", "mlx_rows", "single", "split"]
    assert plans[0] == MLX


def test_chosen_paths_keep_mlx(fake: FakeRunners) -> None:
    assert paths(bench.plans_for(SHAPE, make_device(), paths=["single"])) == ["mlx", "single"]


def test_chosen_partitions(fake: FakeRunners) -> None:
    plans = bench.plans_for(SHAPE, make_device(), paths=["split"], partitions=[2, 3, 64])
    assert plans == [MLX, *(Plan("split", count, "r16") for count in (2, 3, 64))]


def test_every_candidate(fake: FakeRunners) -> None:
    plans = bench.plans_for(SHAPE, make_device(), every=True)
    assert len(plans) > 4
    assert len(set(plans)) == len(plans)
    assert {plan.tile for plan in plans} == {"", "r16", "r32"}


def test_without_a_kernel_only_what_was_asked_for_is_refused(
    fake: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.backends, "get", lambda name: FakeBackend(reason="not built"))
    assert paths(bench.plans_for(SHAPE, make_device())) == ["mlx", "mlx_rows"]
    plans = bench.plans_for(SHAPE, make_device(), partitions=[2])
    assert paths(plans) == ["mlx", "mlx_rows", "split"]
    assert bench.refusal(plans[-1], SHAPE, make_device()) == "not built"


def test_what_cannot_run_as_asked_is_said_first_and_never_run(fake: FakeRunners) -> None:
    """A context of few tokens makes no 64 pieces; the back end may refuse for its own reasons."""
    told: list[Measurement] = []
    for context, partitions, able in ((1024, 64, 16), (1024, 10, 8), (64, 2, 1)):
        shape, plan = Shape(context, 1, 16), Plan("split", partitions, "r16")
        rows = list(
            bench.bench(
                [shape],
                lambda shape, plan=plan: [MLX, plan],  # type: ignore[misc]
                device=make_device(),
                budget_s=60,
                progress=told.append,
            )
        )
        first = told[-2]
        assert (first.plan, first.status) == (plan, "error")
        assert f"makes only {counted(able, 'piece')} of " in first.message
        assert [row["median_us"] is None for row in rows] == [False, True]
        assert fake.last is not None
        assert plan not in fake.last.calls


def test_rows(fake: FakeRunners) -> None:
    shapes = [SHAPE, Shape(8192, 2, 16)]
    told: list[Measurement] = []
    rows = list(
        bench.bench(
            shapes,
            lambda shape: [MLX, Plan("split", 2, "r16")],
            device=make_device(),
            budget_s=60,
            progress=told.append,
        )
    )
    assert [row["shape"] for row in rows] == [str(shape) for shape in shapes for _ in range(2)]
    assert all(list(row) == KEYS for row in rows)
    assert rows[0]["ratio_to_mlx"] == 1.0
    assert rows[1]["ratio_to_mlx"] == pytest.approx(18.0)  # a speed-up
    assert rows[1]["median_us"] == pytest.approx(500.0)
    assert rows[1]["gb_per_s"] == pytest.approx(4096 * 576 * 2 / 500e-6 / 1e9)
    assert rows[1]["gflop_per_s"] == pytest.approx(2 * 16 * 4096 * (512 + 576) / 500e-6 / 1e9)
    assert rows[1]["executed"] == "split x2 r16"
    assert {row["clock"] for row in rows} == {"wall"}
    assert len(told) == 4


def test_rows_say_where_times_are_those_of_the_gpu(fake: FakeRunners) -> None:
    fake.options["queued"] = True
    rows = bench.bench([SHAPE], lambda shape: [MLX], device=make_device(), budget_s=60)
    assert {row["clock"] for row in rows} == {"gpu"}


def test_a_failure_has_a_row_without_times(fake: FakeRunners) -> None:
    fake.options["check_result"] = lambda plan: Checked(plan == MLX, 0.5, "row error 0.5", 1e-4)
    plans = [MLX, Plan("single", 1, "r16")]
    device = make_device()
    good, bad = bench.bench([SHAPE], lambda shape: plans, device=device, budget_s=60)
    assert good["median_us"]
    assert bad["max_error"] == 0.5
    assert {bad[key] for key in KEYS[4:10]} == {None}


def test_too_large_a_shape_is_said_and_not_run() -> None:
    told: list[Measurement] = []
    shape = Shape(1 << 20, 64, 1)
    (row,) = bench.bench(
        [shape], lambda shape: [MLX], device=make_device(), budget_s=1, progress=told.append
    )
    assert row["median_us"] is None
    assert "GiB" in told[0].message


@pytest.mark.usefixtures("kernel")
def test_a_crash_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_Host", DeadlyHost)
    told: list[Measurement] = []
    shape, crash = Shape(4096, 1, 2), CRASH
    monkeypatch.setattr(bench, "refusal", lambda plan, shape, device: None)
    good, bad = bench.bench(
        [shape],
        lambda shape: [MLX, crash],
        device=make_device(),
        budget_s=20,
        progress=told.append,
    )
    assert good["median_us"]
    assert bad["median_us"] is None
    assert [m.message for m in told if m.plan == crash] == [
        "the process of the search died (signal 11)"
    ]


@pytest.mark.usefixtures("kernel")
def test_on_this_machine() -> None:
    device = probe("cpu")
    shape = Shape(200, 2, 4, lengths=(200, 70))
    rows = list(
        bench.bench(
            [shape], lambda shape: bench.plans_for(shape, device), device=device, budget_s=20
        )
    )
    assert [row["path"] for row in rows].count("split") == 1
    for row in rows:
        assert row["executed"] == str(Plan(row["path"], row["partitions"], row["tile"]))  # type: ignore[arg-type]
        assert row["median_us"]
        assert row["max_error"] < 6e-2  # type: ignore[operator]
