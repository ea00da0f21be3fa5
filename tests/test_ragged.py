"""Looking up batches of unequal contexts: the rules, the model of such batches, the scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mla_tuner import backends
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape, bucket_of
from tools.ragged import __main__ as command
from tools.ragged import times
from tools.ragged.__main__ import Machine, answers, markdown, stored
from tools.ragged.batches import PIECES, RULES, Rule, all_pieces, batches, mixes
from tools.replay import devices

RULE = {rule.name: rule for rule in RULES}
FLOOR = RULE[f"sum / longest, {PIECES} partitions or more"]
SAME = RULE["sum / longest, as many pieces in all"]


def ragged(*lengths: int, heads: int = 16) -> Shape:
    return Shape(max(lengths), len(lengths), heads, lengths=lengths)


def splits(*counts: int, tile: str = "r16") -> list[Plan]:
    return [Plan("split", count, tile) for count in counts]


# --- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "context", "batch"),
    [
        ("sequences", 32768, 8),
        ("mean context, sequences", 16384, 8),  # 14336
        ("sum / longest", 32768, 4),  # 3.49, then a power of two
        ("sum / longest, up", 32768, 4),
        ("sum / longest, down", 32768, 4),  # 3
        ("sequences of half the longest or more", 32768, 2),
        ("square of the sum / sum of squares", 32768, 8),  # 6.1
        (f"pieces of {PIECES} partitions / {PIECES}", 32768, 4),  # 31 / 8
    ],
)
def test_a_rule_names_the_bucket(name: str, context: int, batch: int) -> None:
    shape = ragged(16384, 32768, *[10922] * 6)
    assert RULE[name].bucket(shape) == bucket_of(context, batch, 16, "bfloat16")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_equal_sequences_are_looked_up_as_they_are(rule: Rule, batch: int) -> None:
    shape = Shape(8192, batch, 16)
    assert rule.bucket(shape) == shape.bucket
    plan = Plan("split", 9, "r16")
    assert rule.plan(plan, shape, splits(8, 9, 10)) == plan


def test_no_rule_touches_the_paths_of_mlx() -> None:
    shape = ragged(8192, 100)
    assert all(rule.plan(MLX, shape, splits(2, 8)) == MLX for rule in RULES)


def test_a_floor_raises_partitions_to_what_is_known() -> None:
    shape = ragged(8192, 100)
    assert FLOOR.plan(Plan("single", 1, "r16"), shape, splits(2, 10)) == splits(10)[0]
    assert FLOOR.plan(Plan("split", 2, "r8"), shape, splits(2, 10)) == splits(2, tile="r8")[0]


def test_as_many_pieces_in_all_leave_room_for_the_short_ones() -> None:
    shape = ragged(32768, 512, 512, 512)
    plan = SAME.plan(Plan("split", 32, "r16"), shape, splits(*range(2, 65)))
    assert plan == Plan("split", 29, "r16")
    assert all_pieces(shape, 29) == 32
    one_in_sixteen = ragged(32768, *[512] * 15)  # not even half of 16 would be left: as it is
    same = Plan("split", 16, "r16")
    assert SAME.plan(same, one_in_sixteen, splits(*range(2, 8), 16)) == same


def test_mixes_keep_their_longest_context() -> None:
    assert mixes(4096) == mixes(4096)
    assert all(max(lengths) == 4096 and min(lengths) >= 1 for lengths in mixes(4096).values())
    found = list(batches([(4096, 16), (1024, 128)], most=8))
    assert {(shape.context, shape.heads) for _, shape in found} == {(4096, 16), (1024, 128)}
    assert all(len(set(shape.lengths)) > 1 and shape.batch <= 8 for _, shape in found)


# --- the model -----------------------------------------------------------------------------------


@pytest.fixture(params=["M1", "M4 Max", "H200"])
def hardware(request: pytest.FixtureRequest) -> devices.Hardware:
    chips = {"M1": devices.apple("M1", 8), "M4 Max": devices.apple("M4 Max", 40)}
    return chips.get(request.param) or devices.h200()


@pytest.mark.parametrize("plan", [Plan("single", 1, "r16"), Plan("split", 6, "r16")], ids=str)
def test_a_ragged_batch_lies_between_its_longest_sequence_and_equal_ones(
    hardware: devices.Hardware, plan: Plan
) -> None:
    shape = ragged(1024, 131072, 4096, 65536)
    least = times.modelled(hardware, Shape(131072, 1, 16), plan)
    most = times.modelled(hardware, Shape(131072, 4, 16), plan)
    assert least <= times.modelled(hardware, shape, plan) <= most


def test_pieces_go_round_the_sequences_as_a_grid_does() -> None:
    shape = ragged(100, 300, 70)
    assert list(times.tasks(shape, 3)) == [100, 128, 70, 128, 44]
    assert len(list(times.tasks(shape, 3))) == all_pieces(shape, 3)


def test_a_short_sequence_costs_a_wave_where_the_long_one_fills_the_device() -> None:
    """Where the model sees what `as many pieces in all` is about."""
    hardware = replace(devices.h200(), host_s=0.0)
    shape = ragged(131072, *[4096] * 3, heads=8)
    full, room = (Plan("split", p, "r8") for p in (60, 33))
    alone = Shape(131072, 1, 8)
    few = replace(hardware, device=replace(hardware.device, cores=60))
    assert times.modelled(few, alone, full) < times.modelled(few, alone, room)
    assert times.modelled(few, shape, full) > 1.2 * times.modelled(few, alone, full)


def test_mlx_takes_unequal_sequences_one_by_one(hardware: devices.Hardware) -> None:
    each = [times.modelled(hardware, Shape(n, 1, 16), MLX) for n in (8192, 1024)]
    assert times.modelled(hardware, ragged(8192, 1024), MLX) == pytest.approx(sum(each))
    equal = Shape(8192, 2, 16)
    assert times.modelled(hardware, equal, MLX) == hardware.seconds(equal, MLX)


# --- measuring and scoring -----------------------------------------------------------------------


def test_times_are_paired_within_rounds() -> None:
    slow, fast = splits(2, 3)
    samples = {slow: [2.0, 20.0, 3.0], fast: [1.0, 10.0, 1.0]}
    assert times.relative(samples) == {slow: 2.0, fast: 1.0}


@pytest.mark.parametrize(("undisturbed", "told"), [(0.49, True), (0.5, False)])
def test_a_disturbed_measurement_says_so(undisturbed: float, told: bool) -> None:
    assert ("not judged" in command.title(times.Found({}, 9, undisturbed))) is told


@pytest.mark.usefixtures("kernel")
def test_every_plan_of_every_shape_is_timed() -> None:
    plans = [Plan("single", 1, "r16"), *splits(2)]
    shapes = [ragged(1024, 64), Shape(1024, 1, 16)]
    found = times.measure(shapes, lambda shape: plans, seconds=0.0)
    assert found.rounds == times.MIN_ROUNDS
    assert 0 <= found.undisturbed <= 1
    assert list(found.times) == shapes
    assert all(set(timed) == set(plans) for timed in found.times.values())


@pytest.mark.usefixtures("kernel")
def test_a_plan_that_did_not_run_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match=r"^split x2 r16 ran instead of split x64 r16$"):
        times.measure([Shape(100, 1, 16)], lambda shape: splits(64), seconds=0.0)


def test_ties_are_stored_as_tuned() -> None:
    two, three, four = splits(2, 3, 4)
    assert stored({four: 1.0, two: 1.01, three: 1.5}) == two
    assert stored({MLX: 1.01, two: 1.0}) == MLX
    assert stored({MLX: 1.03, two: 1.0}) == two


def test_a_rule_pays_for_the_plan_of_another_bucket() -> None:
    one, two = Plan("single", 1, "r16"), Plan("split", 2, "r16")

    def seconds(shape: Shape, plan: Plan) -> float:
        return 1.0 if (plan == two) == (shape.batch == 1 or bool(shape.lengths)) else 1.5

    asked = [("one long", ragged(8192, 64, 64, 64))]
    found = list(answers(Machine(seconds, lambda shape: [one, two]), asked))
    regret = {answer.rule: answer.regret for answer in found}
    assert regret["sequences"] == 0.5
    assert regret["sum / longest"] == 0.0
    table = markdown({"here": found})
    assert "| sequences | 50.0 / 50.0 / 50.0 |" in table
    assert all(f"| {rule.name} | " in table for rule in RULES)


def test_simulated_devices_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MODELLED", ((8192, 16),))
    found = command.simulated("M1", 8)
    assert len(found) == len(mixes(8192)) * len(RULES)
    assert {answer.bucket for answer in found if answer.rule == "sequences"} >= {
        str(Shape(8192, 16, 16))
    }


def test_without_the_kernel_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = backends.mlx_paths.MlxBackend("cpu")
    monkeypatch.setattr(backends, "get", lambda name: bare)
    out = tmp_path / "out.json"
    assert command.main(["--json", str(out)]) == 1
    assert not out.exists()
    assert capsys.readouterr().err == "no native kernel for cpu is built in\n"
