"""Checking kernels for real, and judging stored plans on a simulated device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from fakes import FakeBackend, FakeRunners, make_device

from mla_tuner import answers, backends, cases, ops, verify
from mla_tuner.device import MLX_VERSION
from mla_tuner.errors import StoreError
from mla_tuner.evidence import LATE, Measurement
from mla_tuner.measure import Checked, LateError
from mla_tuner.overview import kernels, native
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.table import read_rows

SPLIT = Plan("split", 2, "r16")
DEVICE = make_device()
HERE = "os 2"


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunners:
    made = FakeRunners(lambda shape, plan: 9e-3 if plan == MLX else 1e-3)
    monkeypatch.setattr(verify, "IsolatedRunners", lambda device: made)
    monkeypatch.setattr(verify, "settle", lambda device, force: {})
    monkeypatch.setattr(verify, "software", lambda: {"mlx": MLX_VERSION, "system": HERE})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of this test alone
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "t.db")


def stored(
    store: Store,
    context: int,
    *,
    mlx: str = MLX_VERSION,
    kernel: str = "digest",
    plan: Plan = SPLIT,
    slower: float = 1.0,
    system: str = HERE,
) -> None:
    shape = Shape(context, 1, 16)
    run = store.start_run(DEVICE, kernel=kernel, software={"mlx": mlx, "system": system})
    duel = [
        Measurement(shape, MLX, rounds=6, median_us=9000.0, ratio=1.0),
        Measurement(
            shape,
            plan,
            rounds=6,
            median_us=100.0 * slower,
            ratio=90.0,
            ratio_low=89.0 if plan != MLX else 0.9,
            ratio_high=91.0,
        ),
    ]
    store.record(run, shape.bucket, [], duel[:1] if plan == MLX else duel)


def check(store: Store, budget_s: float = 3600.0) -> tuple[list[verify.PlanCheck], int]:
    return verify.check_plans(
        store, DEVICE, FakeBackend(), budget_s=budget_s, progress=lambda text: None
    )


# --- kernels -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
def test_every_kernel_variant_of_this_machine() -> None:
    backend = backends.get("cpu")
    before = native().isa()
    found = verify.check_kernels(backend)
    assert native().isa() == before
    assert [check.reason for check in found if not check.ok] == []
    assert {check.isa for check in found} == {"mlx", *kernels(backend)}
    for isa in kernels(backend):
        ran = {check.variant for check in found if check.isa == isa}
        assert ran == {f"{path} r{n}" for path in ("single", "split") for n in (16, 32, 64, 128)}
    assert {check.variant for check in found if check.isa == "mlx"} == {"mlx", "mlx_rows"}


def test_without_a_native_kernel_the_mlx_paths_are_checked() -> None:
    found = verify.check_kernels(backends.get("cuda"))
    assert {(check.isa, check.variant, check.ok) for check in found} == {
        ("mlx", "mlx", True),
        ("mlx", "mlx_rows", True),
    }


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.make_case(Shape(100, 1, 4))

    def wrong(*args: object, **options: object) -> tuple[mx.array, mx.array]:
        out, lse = ops.mla_decode(*args, **options)  # type: ignore[call-overload]
        return out * 1.5, lse

    monkeypatch.setattr(verify, "mla_decode", wrong)
    found = verify.run_case(case, MLX)
    assert not found.ok
    assert "context 100" in found.reason
    assert "exceeds" in found.reason


def test_a_kernel_that_fails_or_never_ran_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.make_case(Shape(100, 1, 4))

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of registers")

    with monkeypatch.context() as patch:
        patch.setattr(verify, "mla_decode", fail)
        assert "out of registers" in verify.run_case(case, MLX).reason
    monkeypatch.setattr(verify, "last_run", lambda: None)
    assert "asked for mlx, ran None" in verify.run_case(case, MLX).reason


@pytest.mark.usefixtures("kernel")
def test_a_kernel_that_ignores_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a back end does instead of the plan: fewer or more pieces, another tile."""
    backend = backends.get("cpu")
    right = type(backend).run
    mutants = (
        lambda plan: Plan("single", 1, plan.tile),
        lambda plan: Plan("split", plan.partitions * 2, plan.tile),
        lambda plan: Plan(plan.path, plan.partitions, "r16" if plan.tile != "r16" else "r32"),
    )
    case = cases.make_case(Shape(1000, 2, 40))
    plans = [Plan("split", n, tile) for n in (2, 4, 8) for tile in backend.tiles(Shape(300, 1, 40))]
    assert all(verify.run_case(case, plan).ok for plan in plans)
    for mutant in mutants:
        monkeypatch.setattr(
            type(backend), "run", lambda self, plan, call, m=mutant: right(self, m(plan), call)
        )
        found = [verify.run_case(case, plan) for plan in plans]
        assert not any(each.ok for each in found)
        assert all("asked for split" in each.reason for each in found)


def test_one_bad_case_makes_the_variant_bad() -> None:
    results = [cases.Check(True, 1e-3, ""), cases.Check(False, 0.5, "row error")]
    found = verify._summary("avx2", "split r16", results)
    assert (found.ok, found.max_error, found.cases, found.reason) == (False, 0.5, 2, "row error")


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "noise", "result"),
    [(1e-3, 0.0, "ok"), (10e-3, 0.0, "slower"), (9e-3, 0.3, "undecided")],
)
def test_results(
    runners: FakeRunners, store: Store, seconds: float, noise: float, result: str
) -> None:
    stored(store, 4096)
    runners.seconds = lambda shape, plan: 9e-3 if plan == MLX else seconds
    runners.noise = noise
    (found,), left = check(store)
    assert (found.result, left) == (result, 0)


def test_a_plan_that_went_wrong(runners: FakeRunners, store: Store) -> None:
    stored(store, 4096)
    runners.options["check_result"] = lambda plan: Checked(plan == MLX, 0.5, "row error 0.5", 1e-4)
    (found,), _ = check(store)
    assert found.result == "wrong"
    assert found.measurement is not None
    assert found.measurement.message == "row error 0.5"


def test_too_few_rounds_decide_nothing(runners: FakeRunners, store: Store) -> None:
    stored(store, 4096)
    runners.seconds = lambda shape, plan: 1000.0
    (found,), _ = check(store)
    assert found.result == "undecided"


def test_mlx_winners_and_other_kernels_are_not_timed(runners: FakeRunners, store: Store) -> None:
    stored(store, 1024, plan=MLX)
    stored(store, 2048, kernel="other")
    assert check(store) == ([], 0)
    assert runners.made == []


def counting(store: Store) -> dict[int, Plan]:
    rows = store.tuned(DEVICE, "digest", MLX_VERSION, HERE)
    return {row.bucket.context: row.plan for row in rows}


def test_other_versions_come_first_and_count_from_then_on(
    runners: FakeRunners, store: Store
) -> None:
    stored(store, 1024)
    stored(store, 2048, mlx="0.1")
    stored(store, 2048, mlx="0.2")
    stored(store, 4096, system="os 1")
    stored(store, 8192, system="")
    assert counting(store) == {1024: SPLIT, 8192: SPLIT}
    found, left = check(store)
    order = [(each.row.bucket.context, each.row.mlx, each.row.system) for each in found]
    assert order == [
        (2048, "0.2", HERE),
        (4096, MLX_VERSION, "os 1"),
        (8192, MLX_VERSION, ""),
        (1024, MLX_VERSION, HERE),
    ]
    assert left == 0
    assert [each.now and each.now.system for each in found] == [HERE, HERE, HERE, None]
    assert counting(store) == dict.fromkeys((1024, 2048, 4096, 8192), SPLIT)
    found, _ = check(store)
    assert {(each.row.mlx, each.row.system) for each in found} == {(MLX_VERSION, HERE)}
    assert [each.now for each in found] == [None] * 4


@pytest.mark.parametrize("versions", [{}, {"mlx": "0.1"}, {"system": "os 1"}, {"system": ""}])
def test_a_plan_that_fails_does_not_count_on_any_later_load(
    versions: dict[str, str], runners: FakeRunners, store: Store
) -> None:
    stored(store, 2048, **versions)
    runners.seconds = lambda shape, plan: 9e-3 if plan == MLX else 10e-3
    (found,), _ = check(store)
    assert found.result == "slower"
    assert found.now is not None
    assert found.now.plan == MLX
    for _ in range(2):
        rows = read_rows(store.path, DEVICE)
        policy = Policy(DEVICE, rows, backend=FakeBackend(), system=HERE)
        assert policy.decide(2048, 1, 16, "bfloat16").plan == MLX
        assert counting(store) == {}  # to be tuned again
        assert check(store) == ([], 0)
        store.rebuild()


def test_a_stale_plan_with_too_few_rounds_stays_stale(runners: FakeRunners, store: Store) -> None:
    stored(store, 2048, mlx="0.1")
    runners.seconds = lambda shape, plan: 1.0 if plan == MLX else 0.1
    (found,), _ = check(store)
    assert found.result == "undecided"
    assert counting(store) == {}


@pytest.mark.parametrize(("backend", "queued"), [("cuda", True), ("cuda", False), ("cpu", False)])
def test_what_is_stored_says_by_which_clock_a_gpu_was_timed(
    runners: FakeRunners, store: Store, backend: str, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.DEVICE", make_device(132, backend))
    stored(store, 2048, mlx="0.1")
    runners.options["queued"] = queued
    check(store)
    *_, run = store.runs()[DEVICE]
    expected = {"clock": "gpu" if queued else "wall"} if backend == "cuda" else {}
    assert json.loads(run["conditions"]) == expected
    assert json.loads(run["options"]) == {"command": "verify"}


def test_a_host_that_is_late_refutes_no_plan(runners: FakeRunners, store: Store) -> None:
    stored(store, 2048)

    def late(shape: Shape, plan: Plan) -> float:
        if plan != MLX:
            raise LateError(LATE)
        return 9e-3

    runners.seconds = late
    (found,), _ = check(store)
    assert (found.result, found.now) == ("undecided", None)


def test_a_machine_that_is_not_fit_for_timing_settles_nothing(
    runners: FakeRunners, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "settle", lambda device, force: {"forced": "it is busy"})
    stored(store, 1024)
    stored(store, 2048, mlx="0.1")
    before = store.plans(), len(store.evidence())
    runners.seconds = lambda shape, plan: 9e-3 if plan == MLX else 10e-3
    found, _ = check(store)
    assert [each.result for each in found] == ["slower", "slower"]
    assert [each.note for each in found] == ["not stored, as it is busy"] * 2
    assert (store.plans(), len(store.evidence())) == before
    assert answers.verify_answer(DEVICE, [], found, 0)["ok"] is True

    def full(plan: Plan) -> Checked:
        if plan != MLX:
            raise MemoryError("no room")
        return Checked(True, 1e-6, "", 1e-4)

    runners.options["check_result"] = full  # the load may be what takes the room
    found, _ = check(store)
    assert [(each.result, each.now, each.believed) for each in found] == [
        ("wrong", None, False)
    ] * 2
    assert (store.plans(), len(store.evidence())) == before
    runners.options["check_result"] = lambda plan: Checked(plan == MLX, 0.5, "row error 0.5", 1e-4)
    found, _ = check(store)
    assert [each.now and each.now.plan for each in found] == [MLX, MLX]  # wrong is wrong
    assert answers.verify_answer(DEVICE, [], found, 0)["ok"] is False


def test_a_file_that_cannot_be_written_is_checked_all_the_same(
    runners: FakeRunners, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, 2048, mlx="0.1")
    store.close()
    before = store.path.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with Store(store.path, create=False, upgrade=True) as read_only:
        (found,), _ = check(read_only)
    assert (found.result, found.now) == ("ok", None)
    assert found.note == "not stored, as the database can't be written"
    assert found.believed
    assert store.path.read_bytes() == before


def test_plans_that_do_not_fit_the_budget_are_left(runners: FakeRunners, store: Store) -> None:
    for context, factor in ((1024, 1.0), (2048, 1000.0), (4096, 1.0)):
        stored(store, context, slower=factor)
    found, left = check(store, budget_s=60.0)
    assert (sorted(each.row.bucket.context for each in found), left) == ([1024, 4096], 1)


def test_the_budget_takes_a_sample_but_at_least_one(runners: FakeRunners, store: Store) -> None:
    for context in (1024, 2048, 4096, 8192):
        stored(store, context)
    found, left = check(store, budget_s=0.0)
    assert (len(found), left) == (1, 3)


@pytest.mark.parametrize("count", range(18))
def test_any_first_few_are_spread(count: int) -> None:
    rows = list(range(count))
    spread = verify._spread(rows)  # type: ignore[arg-type]
    assert sorted(spread) == rows  # type: ignore[type-var]
    if count > 4:
        first, second = spread[:2]
        assert abs(first - second) >= count // 4  # type: ignore[operator]


def test_a_database_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "check_kernels", lambda backend: [])
    assert verify.verify(DEVICE, tmp_path / "no.db", 1.0, lambda text: None) == ([], [], 0)
    assert not (tmp_path / "no.db").exists()


def test_an_unusable_database_is_said_before_the_kernels_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "check_kernels", lambda backend: pytest.fail("checked"))
    (tmp_path / "t.db").touch()
    for path, text in ((tmp_path / "t.db", "no tuning data"), (tmp_path, "it is a folder")):
        with pytest.raises(StoreError, match=text):
            verify.verify(DEVICE, path, 1.0, lambda text: None)
    assert (tmp_path / "t.db").read_bytes() == b""
