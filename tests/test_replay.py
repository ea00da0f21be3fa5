"""The replay lab's own parts, and short forms of its scores: `make replay` has the long ones."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeRunner

from mla_tuner.candidates import candidates
from mla_tuner.device import Device
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from tools.replay import __main__ as replay
from tools.replay import devices, gating, noise, record, regret, verdicts
from tools.replay.devices import Hardware, SimBackend
from tools.replay.lab import Score
from tools.replay.recording import Recording, Sweep, load, plan_of, save
from tools.replay.replayed import Played, RecordedBackend, RecordedRunners
from tools.replay.simulate import SimRunner, SimRunners

SHAPE = Shape(4096, 1, 16)

# --- simulated devices ---------------------------------------------------------------------------

# (batch, heads, context, tile): microseconds of split and merge by partitions. One H200, prototype
# kernels in a CUDA graph, driver 580.159.04, 2026-11-29.
LANDSCAPE = {
    (1, 16, 2048, "r16"): {1: 46.6, 2: 26.9, 4: 16.7, 8: 11.8, 16: 9.4, 32: 8.4},
    (1, 16, 8192, "r16"): {1: 170, 4: 48.0, 16: 17.3, 32: 12.4, 64: 10.9},
    (1, 16, 32768, "r16"): {1: 659, 4: 171, 16: 48.4, 32: 28.4, 64: 19.9},
    (1, 20, 32768, "r24"): {1: 832, 8: 107, 32: 33.2, 64: 21.8},
    (1, 16, 131072, "r16"): {16: 172, 32: 91.4, 64: 54.3},
    (1, 128, 8192, "r64"): {1: 276, 8: 42.9, 32: 18.6, 64: 19.3},
    (1, 128, 32768, "r64"): {8: 146, 32: 45.1, 64: 32.9},
    (8, 16, 8192, "r16"): {1: 172, 4: 49.8, 8: 31.4, 16: 27.9, 32: 32.6},
    (32, 16, 8192, "r16"): {1: 175, 2: 99.1, 4: 79.8, 8: 86.2, 16: 96.5},
    (8, 128, 8192, "r64"): {4: 79.6, 6: 58.7, 8: 50.0},
    (32, 128, 8192, "r64"): {1: 287, 2: 170.6, 4: 183.5},
}


@pytest.mark.parametrize(("where", "row"), LANDSCAPE.items())
def test_the_simulated_h200_is_near_the_measured_one(
    where: tuple[int, int, int, str], row: dict[int, float]
) -> None:
    batch, heads, context, tile = where
    for partitions, us in row.items():
        plan = Plan("split" if partitions > 1 else "single", partitions, tile)
        model_us = devices.h200().device_seconds(Shape(context, batch, heads), plan) * 1e6
        assert model_us == pytest.approx(us, rel=0.2)


def test_every_apple_bin_is_there_and_bigger_ones_are_faster() -> None:
    cores = {hardware.device.cores for hardware in devices.apples()}
    assert min(c for c in cores if c) == 7
    assert max(c for c in cores if c) == 80
    small, large = devices.apple("M4", 10), devices.apple("M4 Max", 40)
    for path in ("mlx", "mlx_rows"):
        assert large.seconds(SHAPE, Plan(path)) < small.seconds(SHAPE, Plan(path))
    assert _best(large) < _best(small)


def _best(hardware: Hardware) -> float:
    plans = candidates(SHAPE.bucket, hardware.device, SimBackend(hardware))
    return min(hardware.seconds(SHAPE, plan) for plan in plans)


def test_a_ragged_batch_costs_less_than_a_full_one() -> None:
    hardware = devices.apple("M4 Max", 40)
    full = Shape(8192, 4, 16)
    ragged = replace(full, lengths=(8192, 512, 512, 512))
    for plan in (MLX, Plan("split", 8, "r16")):
        assert hardware.device_seconds(ragged, plan) < hardware.device_seconds(full, plan)


@pytest.mark.parametrize("weather", noise.WEATHERS.values(), ids=noise.WEATHERS)
def test_weather_repeats_by_seed_and_stays_within_its_amplitudes(weather: noise.Noise) -> None:
    def levels() -> list[float]:
        sky = noise.Weather(weather, random.Random(3))
        return [sky.level(at / 10) for at in range(300)]

    most = (1 + weather.drift) * (1 + weather.steps) * (1 + weather.throttle)
    assert levels() == levels()
    assert 1 <= min(levels()) <= max(levels()) <= most * (1 + weather.neighbour)


def test_simulated_runners_share_a_clock_and_fresh_ones_compile_again() -> None:
    runners = SimRunners(lambda shape, plan: 1e-3, noise.QUIET, compile_s=1.0)
    plan = Plan("split", 2, "r16")
    first = runners(SHAPE, 0)
    assert first.check(plan).seconds > 1
    assert first.check(plan).seconds < 1
    with runners.fresh(SHAPE, 0) as alone:
        assert alone.check(plan).seconds > 1
        alone.pause(5.0)
    assert runners.now() == first.now() > 7


# --- recordings ----------------------------------------------------------------------------------


def make_recording(shapes: tuple[Shape, ...] = (SHAPE,)) -> Recording:
    """Eight rounds, the odd ones twice as slow; `mlx` was timed in the first four only."""
    times = {MLX: 900.0, Plan("single", 1, "r16"): 100.0, Plan("split", 2, "r16"): 60.0}
    sweeps = {
        shape: Sweep(
            shape,
            {
                plan: tuple(
                    None if plan == MLX and at > 3 else us * (1 + at % 2) for at in range(8)
                )
                for plan, us in times.items()
            },
            dict.fromkeys(times, 1000.0),
        )
        for shape in shapes
    }
    device = devices.cpu().device
    return Recording(device, "k", {"mlx": "0"}, "", "2026-11-29", "a command", "made up", sweeps)


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    made = make_recording()
    save(made, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=2), "it has format 2"),
        (lambda data: data.pop("kernel"), "no 'kernel'"),
        (lambda data: data["sweeps"][0]["plans"].reverse(), "expected mlx first"),
        (lambda data: data["sweeps"][0]["samples_us"][0].pop(), "rounds of every plan"),
        (lambda data: data["sweeps"][0]["samples_us"][1].__setitem__(0, -1), "times above 0"),
        (lambda data: data["sweeps"][0]["samples_us"].pop(), "shorter|argument"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, change: object, message: str
) -> None:
    path = tmp_path / "r.json"
    save(make_recording(), path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plan", [MLX, Plan("single", 1, "r16"), Plan("split", 12, "r128")])
def test_plans_are_read_as_they_are_written(plan: Plan) -> None:
    assert plan_of(str(plan)) == plan


def test_the_plans_of_a_recorded_round_are_paired() -> None:
    played = Played(make_recording().sweeps[SHAPE], cores=2)
    runner = RecordedRunners({SHAPE: played}, seed=1)(SHAPE, 0)
    ratios = set()
    for _ in range(20):
        times = [runner.sample(plan, 1)[0] for plan in played.samples]
        ratios.add(round(times[1] / times[2], 6))
    assert ratios == {round(100 / 60, 6)}
    assert {played.us(MLX, at) for at in range(8)} == {900.0, 1800.0}  # holes are filled in step


def test_partitions_between_recorded_ones_are_interpolated_within_a_wave() -> None:
    sweep = make_recording().sweeps[SHAPE]
    more = {Plan("split", 4, "r16"): (40.0,) * 8, Plan("split", 16, "r16"): (160.0,) * 8}
    sweep = replace(sweep, samples={**sweep.samples, **more})
    assert Played(sweep, 64).us(Plan("split", 8, "r16"), 0) == pytest.approx(80.0)
    assert Played(sweep, 8).us(Plan("split", 8, "r16"), 0) == pytest.approx(40.0)
    with pytest.raises(ValueError, match="beyond"):
        Played(sweep, 64).us(Plan("split", 32, "r16"))


def test_a_tuner_is_held_to_what_was_recorded() -> None:
    sweeps = {SHAPE: Played(make_recording().sweeps[SHAPE], 2)}
    other = Plan("split", 3, "r16")
    assert RecordedBackend(make_recording(), sweeps, strict=True).refusal(other, SHAPE)
    assert RecordedBackend(make_recording(), sweeps, strict=False).refusal(other, SHAPE) is None


def test_regret_of_a_recording_that_is_the_same_everywhere_is_nothing() -> None:
    shapes = tuple(Shape(context, 1, 16) for context in (2048, 3000, 4096, 5000))
    choices = regret.recorded(make_recording(shapes), seeds=(1,))
    assert [choice.shape.context for choice in choices] == [3000]  # 5000 is beyond what is tuned
    assert choices[0].plan == Plan("split", 2, "r16")
    assert choices[0].regret == pytest.approx(0.0)
    assert all(score.met for score in regret.scores("made up", choices))


def test_a_sweep_times_hopeless_plans_in_the_first_rounds_only() -> None:
    hardware = devices.cpu()
    plans = candidates(SHAPE.bucket, hardware.device, SimBackend(hardware))
    runner = SimRunners(hardware.seconds, noise.QUIET)(SHAPE, 0)
    sweep = record.open_sweep(runner, SHAPE, plans, deadline=1e9)
    assert sweep is not None
    assert set(sweep.samples) == set(plans)
    while sweep.rounds < record.ROUNDS:
        sweep = record.more_rounds(runner, sweep)
    assert sweep.rounds == record.ROUNDS
    assert sum(t is not None for t in sweep.samples[MLX]) == record.HOPELESS_ROUNDS
    assert None not in sweep.samples[Plan("split", 2, "r16")]
    assert record.open_sweep(runner, SHAPE, plans, deadline=runner.now() + 0.1) is None


def test_chains_of_a_recording_are_as_long_as_samples_ask_for() -> None:
    """The first call waits for the host, and says nothing about one of a queue."""
    runner = FakeRunner(lambda plan: 2.1e-5, queued=True)  # its check takes 5 times as long
    sweep = record.open_sweep(runner, SHAPE, [MLX], deadline=1e9)
    assert sweep is not None
    record.more_rounds(runner, sweep)
    assert runner.chains[-record.A_TURN :] == [20] * record.A_TURN  # 0.4 ms together
    assert runner.chains.count(20) >= record.A_TURN + record.HOPELESS_ROUNDS


def test_a_recording_visits_all_shapes_in_turn_and_goes_on_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = devices.cpu()
    visits: list[Shape] = []

    class Runners(SimRunners):
        def __init__(self, device: Device) -> None:
            super().__init__(hardware.seconds, noise.QUIET)

        def __call__(self, shape: Shape, seed: int) -> SimRunner:
            visits.append(shape)
            return super().__call__(shape, seed)

    for name, stand_in in {
        "LiveRunners": Runners,
        "exact_candidates": lambda s, d: candidates(s.bucket, d, SimBackend(hardware)),
        "settle": lambda device, force: {},
    }.items():
        monkeypatch.setattr(record, name, stand_in)
    shapes, out = (SHAPE, replace(SHAPE, context=8192)), tmp_path / "r.json"
    monkeypatch.setattr(record, "ROUNDS", 7)
    monkeypatch.setattr("sys.argv", ["tools.replay", "record", "--out", str(out)])
    record.record(out, shapes, budget_s=1e6, tell=print)
    assert load(out).command == "python -m tools.replay record --out r.json"
    assert visits == [*shapes]
    monkeypatch.setattr(record, "ROUNDS", 12)
    record.record(out, shapes, budget_s=1e6, tell=print)
    assert visits[2:] == [*shapes, *shapes]
    assert [sweep.rounds for sweep in load(out).sweeps.values()] == [12, 12]


def test_the_shipped_recordings_hold_tuned_and_held_out_shapes() -> None:
    for path in replay.RECORDINGS.glob("*.json"):
        recording = load(path)
        assert recording.kernel
        assert recording.software["mlx"]
        assert recording.command
        assert not re.search(r"(^|[ =])/", recording.command)  # nobody's folders
        grid = {shape for shape in recording.sweeps if regret.on_grid(shape)}
        assert 0 < len(grid) < len(recording.sweeps)


# --- scores, in short ----------------------------------------------------------------------------


@pytest.mark.parametrize("weather", verdicts.WEATHERS.items(), ids=verdicts.WEATHERS)
def test_equal_candidates_are_not_promoted(weather: tuple[str, noise.Noise]) -> None:
    assert verdicts.equal(*weather, runs=30).met


@pytest.mark.parametrize("name", ["quiet", "drifting 20 %", "thermal 20 %"])
def test_gains_of_5_percent_are_found(name: str) -> None:
    assert verdicts.gains(name, verdicts.WEATHERS[name], runs=30).met


def test_winners_do_not_flip_on_a_quiet_machine() -> None:
    buckets = verdicts.flip_buckets([2048, 16384])
    assert verdicts.flips(devices.cpu(), "quiet", noise.QUIET, buckets).met


def test_budgets_hold() -> None:
    assert verdicts.budgets(devices.cpu(), [20, 60]).met


def test_gates_never_lose_to_mlx_and_leave_no_holes() -> None:
    few = [devices.apple("M1", 7), devices.apple("M5", 10), devices.apple("M3 Ultra", 80)]
    assert gating.losses(few).met
    assert gating.holes(few[2:]).met


def test_the_table_marks_what_is_missed() -> None:
    scores = [Score("a", "1", "0", False), Score("b", "2"), Score("c", "3", "3", True)]
    *_, missed, told, met = replay.table(scores).splitlines()
    assert missed == "| a | 1 | 0 | **no** |"
    assert told == "| b | 2 |  |  |"
    assert met == "| c | 3 | 3 | yes |"
