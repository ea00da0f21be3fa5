"""Merging is a union of evidence: in any order, in any grouping, as often as one likes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import answer, error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from share_tables import H200, KERNEL, SINGLE, SPLIT, any_kernel, duel, fill, table_of

from mla_tuner import share
from mla_tuner.errors import ShareError
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.share_format import SharedEntry, SharedRun, SharedTable, render, run_id, settled
from mla_tuner.share_pool import Entry, pool

__all__ = ["any_kernel"]  # the fixture
SHAPE = Shape(32768, 1, 16)
OTHER = Plan("split", 32, "r16")
FACTS = {
    **{name: getattr(H200, name) for name in ("key", "backend", "architecture", "name")},
    **{name: getattr(H200, name) for name in ("cores", "memory_gb", "cache_bytes")},
    "kernel": KERNEL,
    "mlx": "0.32.4",
    "system": "Ubuntu 24.04",
}
VERSIONS = (H200.key, KERNEL, "0.32.4", "Ubuntu 24.04")
SOFTWARE = {"mla_tuner": "0.1.0", "mlx": "0.32.4", "os": "Ubuntu"}


def entry(plan: Plan = SPLIT, ratio: float = 2.0, run: str = "a" * 16, **more: object) -> Entry:
    """Seven rounds of a plan that is faster by `ratio`."""
    us = (100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0)
    rival = () if plan == MLX or more.get("failed") else tuple(each / ratio for each in us)
    values = {"failed": "", "max_error": 1e-3, "baseline": "mlx", "baseline_samples_us": us}
    values |= {"best": (), "day": "2026-11-30", "samples_us": rival, **more}
    return Entry(run=run, plan=plan, **values)  # type: ignore[arg-type]


# --- the winner of a set of entries --------------------------------------------------------------


def test_two_machines_pool_their_pairs() -> None:
    alone = entry(ratio=1.5, samples_us=(50.0,) * 4, baseline_samples_us=(75.0,) * 4)
    assert pool([alone]).plan == MLX  # four rounds have no interval
    both = pool([alone, entry(ratio=1.6, run="b" * 16)])
    assert (both.plan, both.rounds) == (SPLIT, 11)
    assert both.speedup_low == 1.5
    assert both.speedup == pytest.approx(1.6)


def test_where_they_disagree_the_baseline_stays() -> None:
    assert pool([entry(ratio=1.5), entry(ratio=0.9, run="b" * 16)]).plan == MLX
    many = [entry(ratio=1.5, run=f"{i:016x}") for i in range(9)]
    assert pool(many).plan == SPLIT
    # One machine on which it is slower for sure: never slower is a promise to all.
    assert pool([*many, entry(ratio=0.9, run="b" * 16)]).plan == MLX


@pytest.mark.parametrize("failed", ["wrong", "error"])
def test_a_plan_that_failed_anywhere_never_wins(failed: str) -> None:
    bad = entry(failed=failed, run="b" * 16)
    assert pool([entry(), bad]).plan == MLX
    assert pool([entry(), bad, entry(OTHER, 1.2, "c" * 16)]).plan == OTHER


def test_the_surest_plan_wins_and_ties_go_to_the_plainer() -> None:
    assert pool([entry(SPLIT, 2.0), entry(OTHER, 2.1, "b" * 16)]).plan == OTHER
    assert pool([entry(SPLIT, 2.0), entry(OTHER, 2.0, "b" * 16)]).plan == OTHER


def test_a_plan_is_compared_with_the_first_baseline_that_runs_anywhere() -> None:
    without = entry(SINGLE, 9.0, baseline="mlx_rows")
    assert pool([without]).baseline == "mlx_rows"
    found = pool([without, entry(SPLIT, 2.0, "b" * 16)])
    assert (found.baseline, found.plan) == ("mlx", SPLIT)


def test_what_was_never_timed_has_no_winner() -> None:
    with pytest.raises(ValueError, match="no entry has times of the baseline"):
        pool([entry(failed="wrong", baseline_samples_us=())])


# --- merging as algebra --------------------------------------------------------------------------

RUNS = [
    SharedRun(id=run_id(VERSIONS, told), **told)
    for told in (
        {
            "nonce": f"{i:016x}",
            "day": f"2026-11-{20 + i}",
            "clock": "gpu",
            "software": SOFTWARE,
            "options": {"seed": i},
        }
        for i in range(4)
    )
]
times = st.lists(st.sampled_from([10.0, 20.0, 21.0, 40.0]), min_size=1, max_size=8)
plans = st.sampled_from([MLX, SPLIT, OTHER, SINGLE])


@st.composite
def entries(draw: st.DrawFn, run: SharedRun) -> SharedEntry:
    plan, us = draw(plans), tuple(draw(times))
    failed = draw(st.sampled_from(["", "", "wrong"])) if plan != MLX else ""
    rival = () if failed or plan == MLX else tuple(draw(times))
    best = ({**vars(SPLIT), "speedup": draw(st.sampled_from([0.5, 2.0]))},)
    return SharedEntry(
        **{"run": run.id, **vars(plan), "failed": failed, "max_error": None},
        samples_us=rival,
        baseline="mlx",
        baseline_samples_us=us,
        best=draw(st.sampled_from([(), best])),
        day=run.day,
    )


@st.composite
def tables(draw: st.DrawFn) -> SharedTable:
    """Of four runs and three buckets; two tables may tell different things of the same run."""
    evidence = {}
    for shape in draw(st.sets(st.sampled_from([SHAPE, Shape(8192, 1, 16), Shape(4096, 2, 128)]))):
        runs = draw(st.sets(st.sampled_from(range(len(RUNS))), min_size=1))
        evidence[shape.bucket] = [draw(entries(RUNS[i])) for i in sorted(runs)]
    if not evidence:
        evidence = {SHAPE.bucket: [draw(entries(RUNS[0]))]}
    name = draw(st.sampled_from(["NVIDIA H200", "H200"]))
    device = settled({**FACTS, "name": name}, RUNS, evidence)
    assert device is not None
    return SharedTable(version=2, family=H200.family, devices=(device,))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tables(), tables(), tables())
def test_merge_is_associative_commutative_and_idempotent(
    a: SharedTable, b: SharedTable, c: SharedTable
) -> None:
    merged = share.merged
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert render(merged(a, b)) == render(merged(b, a))
    assert render(merged(a, a)) == render(a)
    assert merged(merged(a, b), b) == merged(a, b)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tables(), tables())
def test_a_union_holds_every_entry_and_no_other(a: SharedTable, b: SharedTable) -> None:
    def entries(table: SharedTable) -> set[tuple[object, str]]:
        buckets = [bucket for device in table.devices for bucket in device.buckets]
        return {(bucket.bucket, each.run) for bucket in buckets for each in bucket.evidence}

    both = share.merged(a, b)
    assert entries(both) == entries(a) | entries(b)
    for device in both.devices:
        for bucket in device.buckets:
            assert pool([each.entry for each in bucket.evidence]).plan == bucket.plan


def test_families_do_not_merge(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t.db", duel(SHAPE, SPLIT))
    other = table.model_copy(update={"family": "nvidia-sm100"})
    with pytest.raises(ShareError, match="nvidia-sm90 and nvidia-sm100 are different families"):
        share.merged(table, other)


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Files of two runs of which one found another plan for the longest context."""
    paths = []
    for name, plan in (("a", SPLIT), ("b", OTHER)):
        table = table_of(tmp_path / f"{name}.db", duel(SHAPE, plan, 2.0 if name == "a" else 2.5))
        paths.append(str(share.write(table, tmp_path / name / "nvidia-sm90.json")))
    return paths[0], paths[1]


def test_the_command_merges_and_keeps_what_is_there(two: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "pooled.json"
    assert answer("share", "merge", str(out), *two) == {"file": str(out), "runs": 2, "buckets": 1}
    assert share.faults(out.read_text(), out.with_name("nvidia-sm90.json")) == []
    (bucket,) = share.read(out).devices[0].buckets
    assert (bucket.plan, len(bucket.evidence)) == (OTHER, 2)
    before = out.read_text()
    assert "is there already" in error("share", "merge", str(out), *two)
    run("share", "merge", str(out), str(out), two[0])
    assert out.read_text() == before


def test_the_command_tells_what_differs(two: tuple[str, str], tmp_path: Path) -> None:
    found = answer("share", "diff", *two)
    assert [len(found[name]) for name in ("only_a", "only_b", "changed")] == [0, 0, 1]
    assert (found["changed"][0]["context"], found["changed"][0]["same_plan"]) == (32768, False)
    text = run("share", "diff", *two).stdout
    assert "split x40 r16 2x [2, 2] of 1 run -> split x32 r16 2.5x [2.5, 2.5] of 1 run" in text
    assert run("share", "diff", two[0], two[0]).stdout == "no difference\n"
    table_of(tmp_path / "c.db", duel(Shape(1024, 1, 16), MLX))
    run("share", "export", "--folder", str(tmp_path / "c"), "--db", str(tmp_path / "c.db"))
    other = str(tmp_path / "c" / "nvidia-sm90.json")
    assert f"only in {other}: cuda/sm_90/132c/140gb" in run("share", "diff", two[0], other).stdout


@pytest.mark.parametrize("command", ["merge", "diff", "import"])
def test_a_file_that_lies_is_refused_by_name_and_field(
    two: tuple[str, str], tmp_path: Path, command: str
) -> None:
    path = Path(two[0])
    path.write_text(path.read_text().replace('"partitions": 40', '"partitions": 400'))
    out = [str(tmp_path / "new.json")] if command == "merge" else []
    files = [two[0]] if command == "import" else [*two]
    line = error("share", command, *out, *files)
    assert line.startswith("nvidia-sm90.json: devices.0.buckets.0.partitions: ")
    missing = ["none.json"] if command == "import" else [two[1], "none.json"]
    assert "cannot read none.json: No such file" in error("share", command, *out, *missing)
    assert not (tmp_path / "new.json").exists()


def test_a_tile_that_is_none_is_refused_where_it_lost(two: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "nvidia-sm90.json"
    run("share", "merge", str(out), *two)
    lost = '"partitions": 40, "tile": "r16"'
    text = out.read_text()
    assert text.count(lost) >= 1
    with pytest.raises(ShareError, match=r"buckets\.0\.evidence\.\d\.tile: "):
        share.load(text.replace(lost, lost.replace("r16", "evil!")), out.name)


def test_a_contribution_is_the_file_and_the_text(tmp_path: Path) -> None:
    fill(tmp_path / "t.db").close()
    folder = tmp_path / "tuning_db"
    args = ("share", "contribute", "--folder", str(folder), "--db", str(tmp_path / "t.db"))
    (found,) = answer(*args)
    path = folder / "nvidia-sm90.json"
    assert (found["file"], found["title"]) == (
        str(path),
        "Tuning table of NVIDIA H200: 3 buckets",
    )
    assert share.check(path) == []
    text = found["text"]
    assert "Kernel `0123456789abcdef`, MLX 0.32.4, Ubuntu 24.04, driver 580.1." in text
    assert "| 32K b1 h16 bf16 | split x40 r16 | 3x mlx (3 to 3) | 19 | 1 | new |" in text
    assert "| 1K b1 h16 bf16 | mlx | 1 | 19 | 1 | new |" in text
    assert "somebody" not in text
    assert "holds all that is in" in error(*args)
    fill(tmp_path / "t.db", seed=1).close()
    again = run(*args).stdout
    assert "| 32K b1 h16 bf16 | split x40 r16 | 3x mlx (3 to 3) | 38 | 2 | split x40 r16 |" in again
    assert len(share.read(path).devices[0].runs) == 2


@pytest.mark.usefixtures("any_kernel")
def test_what_was_pulled_of_another_family_is_no_obstacle(tmp_path: Path) -> None:
    folder, db = tmp_path / "tuning_db", tmp_path / "t.db"
    other = replace(H200, family="nvidia-sm100", architecture="sm_100", name="NVIDIA B200")
    theirs = table_of(tmp_path / "theirs.db", duel(SHAPE, MLX), device=other)
    share.write(theirs, folder / "nvidia-sm100.json")
    with fill(db) as store:
        share.into_store(theirs, store)
    args = ("share", "contribute", "--folder", str(folder), "--db", str(db))
    (found,) = answer(*args)
    assert found["file"] == str(folder / "nvidia-sm90.json")
    assert error(*args) == f"{folder} holds all that is in {db} already"
