"""Which stored winners hold after an upgrade, on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeBackend, FakeRunners, make_device

from mla_tuner import recheck
from mla_tuner.evidence import Measurement
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.recheck import Versions, revalidate, stale
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.table import Row, read_rows

SPLIT, SINGLE = Plan("split", 2, "r16"), Plan("single", 1, "r16")
DEVICE = make_device()
OLD, NEW = Versions("digest", "1.0", "os 1"), Versions("digest", "1.0", "os 2")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "t.db")


def run_of(store: Store, versions: Versions) -> int:
    software = {"mlx": versions.mlx, "system": versions.system}
    return store.start_run(DEVICE, kernel=versions.kernel, software=software)


def tuned(store: Store, versions: Versions, context: int = 4096, plan: Plan = SPLIT) -> None:
    """A bucket where `plan` won: SINGLE and SPLIT were searched, SPLIT met `mlx` again."""
    shape = Shape(context, 1, 16)
    ratio = 0.8 if plan == MLX else 3.0
    search = [
        Measurement(shape, MLX, rounds=6, median_us=9000.0, ratio=1.0),
        Measurement(shape, SINGLE, rounds=6, median_us=1e4, ratio=ratio / 2),
        Measurement(shape, SPLIT, rounds=6, median_us=3000.0, ratio=ratio),
    ]
    interval = {"ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1}
    duel = [search[0], Measurement(shape, SPLIT, rounds=6, median_us=3000.0, **interval)]
    store.record(run_of(store, versions), shape.bucket, search, duel)


def again(store: Store, speedup: float, **options: object) -> Row | None:
    """The winner of the only stale bucket after an upgrade on a device with a known truth."""
    (row,) = stale(store, DEVICE, NEW)
    runners = FakeRunners(lambda shape, plan: 9e-3 / (1.0 if plan == MLX else speedup))
    runners.options.update(options)
    runner = runners(row.bucket.shape, 0)
    run = run_of(store, NEW)
    return revalidate(store, run, DEVICE, row, NEW, runner=runner, budget_s=60.0)


def known(store: Store, versions: Versions = NEW) -> list[Plan]:
    found = store.tuned(DEVICE, versions.kernel, versions.mlx, versions.system)
    return [row.plan for row in found]


def served(store: Store, versions: Versions = NEW) -> tuple[Plan, str]:
    """What a serving process with these versions makes of the file now."""
    rows = read_rows(store.path, DEVICE)
    policy = Policy(DEVICE, rows, backend=FakeBackend(), mlx=versions.mlx, system=versions.system)
    decision = policy.decide(4096, 1, 16, "bfloat16")
    return decision.plan, decision.source


def unchanged_by_rebuild(store: Store) -> bool:
    before = store.plans(), store.refuted(DEVICE), known(store), served(store)
    store.rebuild()
    return before == (store.plans(), store.refuted(DEVICE), known(store), served(store))


@pytest.mark.parametrize("old", [OLD, Versions("digest", "0.9", "os 2")])
def test_a_winner_that_passes_counts_from_then_on(old: Versions, store: Store) -> None:
    tuned(store, old)
    assert (known(store), served(store)) == ([], (MLX, "gates"))
    row = again(store, 2.0)
    assert row is not None
    assert (row.plan, row.mlx, row.system) == (SPLIT, NEW.mlx, NEW.system)
    assert row.split_speedup == pytest.approx(2.0)
    assert row.single_speedup is None  # nobody measured it here
    assert (known(store), served(store)) == ([SPLIT], (SPLIT, "tuned"))
    assert (known(store, old), served(store, old)) == ([SPLIT], (SPLIT, "tuned"))  # still
    assert stale(store, DEVICE, NEW) == []
    assert unchanged_by_rebuild(store)


@pytest.mark.parametrize(
    ("speedup", "options"),
    [
        (0.8, {}),
        (2.0, {"check_result": lambda plan: Checked(plan == MLX, 0.5, "row error", 1e-4)}),
    ],
)
def test_a_winner_that_fails_counts_no_longer(
    speedup: float, options: dict[str, object], store: Store
) -> None:
    tuned(store, OLD)
    before = len(store.evidence())
    assert again(store, speedup, **options) is None
    assert known(store) == []  # the tuner starts anew
    assert served(store) == (MLX, "tuned")  # serving is safe until then
    assert stale(store, DEVICE, NEW) == []
    assert [each["stage"] for each in store.evidence()[before:]] == ["refute", "refute"]
    assert served(store, OLD) == (SPLIT, "tuned")
    assert unchanged_by_rebuild(store)
    tuned(store, NEW)  # a later duel supersedes
    assert (known(store), served(store)) == ([SPLIT], (SPLIT, "tuned"))
    assert unchanged_by_rebuild(store)


def test_a_winner_that_nobody_can_tell_about_stays_stale(store: Store) -> None:
    tuned(store, OLD)
    assert again(store, 1.01) is None
    assert (known(store), served(store)) == ([], (MLX, "gates"))
    assert [each["stage"] for each in store.evidence()[-2:]] == ["cut", "cut"]
    assert len(stale(store, DEVICE, NEW)) == 1


def test_a_device_that_runs_nothing_refutes_nothing(store: Store) -> None:
    def broken(plan: Plan) -> Checked:
        raise RuntimeError("device lost")

    tuned(store, OLD)
    assert again(store, 2.0, check_result=broken) is None
    assert store.refuted(DEVICE) == []
    assert len(stale(store, DEVICE, NEW)) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("winner", [SPLIT, MLX])
def test_where_mlx_itself_fails_nothing_is_judged_wrong(
    winner: Plan, late: bool, store: Store
) -> None:
    """Be it in its check, or in the rounds after a rival that went wrong, too."""

    def broken(plan: Plan) -> Checked:
        return Checked(late and plan == MLX, 0.5, "row error", 1e-4)

    def executed(plan: Plan) -> Plan | None:
        return None

    tuned(store, OLD, plan=winner)
    assert again(store, 2.0, check_result=broken, executed=executed) is None
    assert store.refuted(DEVICE) == []
    assert len(stale(store, DEVICE, NEW)) == 1


def test_mlx_as_the_winner_meets_the_best_rival_again(store: Store) -> None:
    tuned(store, OLD, plan=MLX)
    assert (row := again(store, 0.8)) is not None
    assert (row.plan, row.split_speedup) == (MLX, pytest.approx(0.8))
    assert known(store) == [MLX]
    assert unchanged_by_rebuild(store)


def test_the_rival_of_mlx_may_win_with_new_versions(store: Store) -> None:
    tuned(store, OLD, plan=MLX)
    assert (row := again(store, 2.0)) is not None
    assert row.plan == SPLIT
    assert (known(store), served(store)) == ([SPLIT], (SPLIT, "tuned"))


def test_mlx_without_a_rival_is_left_to_the_tuner(store: Store) -> None:
    shape = Shape(4096, 1, 16)
    alone = [Measurement(shape, MLX, rounds=6, median_us=9000.0, ratio=1.0)]
    store.record(run_of(store, OLD), shape.bucket, [], alone)
    assert again(store, 2.0) is None
    assert known(store) == []


def test_only_other_systems_and_mlx_make_stale(store: Store) -> None:
    tuned(store, OLD, 1024)
    tuned(store, Versions("digest", "0.9", "os 2"), 1024)
    tuned(store, NEW, 2048)
    tuned(store, OLD, 2048)
    tuned(store, Versions("digest", "1.0", ""), 3072)  # unknown is not different
    tuned(store, Versions("other", "1.0", "os 1"), 8192)  # another kernel: tune anew
    assert [(row.bucket.context, row.mlx) for row in stale(store, DEVICE, NEW)] == [(1024, "0.9")]
    assert stale(store, DEVICE, Versions("digest", "1.0", "")) == []


def test_the_last_one_found_is_taken_whatever_the_clock_said(store: Store) -> None:
    tuned(store, OLD)
    tuned(store, Versions("digest", "0.9", "os 2"))
    store._db.execute("UPDATE plan SET day = '2099-01-01' WHERE system = 'os 1'")
    assert [row.mlx for row in stale(store, DEVICE, NEW)] == ["0.9"]


def test_versions_of_this_process() -> None:
    found = Versions.of("digest", {"mlx": "1.0", "system": "os 2", "python": "3.11"})
    assert found == NEW
    assert recheck.Versions("digest", "1.0", "") != NEW


def test_an_unknown_system_is_not_known_to_be_the_same(store: Store) -> None:
    """So a winner has to clear `mlx` as a new one would, and passing is news each time."""
    unknown = Versions("digest", "1.0", "")
    tuned(store, unknown)
    (row,) = store.plans(DEVICE.key)
    runners = FakeRunners(lambda shape, plan: 9e-3 / (1.0 if plan == MLX else 1.01))
    assert not unknown.same(row)
    assert not NEW.same(row)
    for versions in (unknown, NEW):
        check, _ = recheck.recheck(
            store, DEVICE, row, versions, runner=runners(row.bucket.shape, 0), budget_s=60.0
        )
        assert (check.result, recheck.tells(check, versions)) == ("undecided", True)
    assert NEW.same(row._replace(system=NEW.system))
