"""What a shape gets from tables of other devices: the same device first, the nearest next."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import answer, run
from fakes import FakeBackend
from share_tables import H200, KERNEL, SOFTWARE, SPLIT, any_kernel, duel, fill, start, table_of

from mla_tuner import backends, family, policy, share
from mla_tuner import device as devices
from mla_tuner.device import Device
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import CONTEXT_GRID, Bucket, Shape, pieces
from mla_tuner.store import Store

__all__ = ["any_kernel"]  # the fixture
SYSTEM = SOFTWARE["system"]
HERE = Path("nowhere.db")
CUT = replace(H200, cores=66, name="NVIDIA H200 MIG", memory_gb=71)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBackend:
    """A CUDA back end with the tables' kernel, and a folder of tables of its own."""
    backend = FakeBackend(name="cuda", kernel=KERNEL)
    monkeypatch.setattr(backends, "get", lambda name: backend)
    monkeypatch.setattr(devices, "system_version", lambda: SYSTEM)
    monkeypatch.setattr(policy, "MLX_VERSION", "0.32.4")
    monkeypatch.setattr(family, "FOLDERS", (tmp_path / "tuning_db",))
    return backend


def packaged(tmp_path: Path, *duels: list, device: Device = H200, kernel: str = KERNEL) -> Path:
    """Write a table where the package has its tables."""
    name = f"{device.cores}-{device.memory_gb}-{kernel[:4]}.db"
    table = table_of(tmp_path / name, *duels, device=device, kernel=kernel)
    path = tmp_path / "tuning_db" / f"{table.family}.json"
    if path.exists():
        table = share.merged(share.read(path), table)
    path.parent.mkdir(exist_ok=True)
    path.write_text(share.render(table))
    return path


def load(device: Device, database: Path = HERE, mlx: str = "0.32.4") -> Policy:
    shared = family.load(device, KERNEL, database)
    return Policy(device, shared=shared, mlx=mlx, system=SYSTEM)


LONG, SHORT = duel(Shape(32768, 1, 16), SPLIT), duel(Shape(1024, 1, 16), MLX)


def test_a_table_of_this_very_device_counts_as_tuned(tmp_path: Path) -> None:
    packaged(tmp_path, SHORT, LONG)
    found = load(H200).decide(32000, 1, 16, "bfloat16")
    assert (found.plan, found.source, found.speedup) == (SPLIT, "tuned", 3.0)
    day = found.reason.split(")")[1][1:11]
    assert found.reason == (
        f"tuned on another NVIDIA H200 (the shared table nvidia-sm90.json) {day}: "
        "split x40 r16 is 3x mlx [3, 3] at context 32768"
    )
    assert load(H200).decide(1024, 1, 16, "bfloat16").plan == MLX
    between = load(H200).decide(8192, 1, 16, "bfloat16")
    assert (between.source, between.reason[:29]) == ("fitted", "between tuned contexts 1024 (")


def test_what_was_measured_here_wins(tmp_path: Path) -> None:
    packaged(tmp_path, SHORT, LONG)
    less = Plan("split", 32, "r16")
    with Store(tmp_path / "own.db") as store:
        store.record(start(store), Shape(32768, 1, 16).bucket, (), duel(Shape(32768, 1, 16), less))
    table = Policy.load(tmp_path / "own.db", H200)
    found = table.decide(32768, 1, 16, "bfloat16")
    assert (found.plan, found.source) == (less, "tuned")
    assert found.reason.startswith("tuned on this device")
    assert table.decide(1024, 1, 16, "bfloat16").reason.startswith("tuned on another NVIDIA H200")


@pytest.mark.parametrize("mlx", ["0.32.4", "0.33.0"])
def test_the_same_device_with_another_mlx_is_family(tmp_path: Path, mlx: str) -> None:
    packaged(tmp_path, LONG)
    found = load(H200, mlx=mlx).decide(32768, 1, 16, "bfloat16")
    assert (found.plan, found.source) == (SPLIT, "tuned" if mlx == "0.32.4" else "family")
    assert ("MLX 0.32.4" in found.reason) == (mlx == "0.33.0")


def test_another_device_lends_its_plan_scaled_by_the_law(tmp_path: Path) -> None:
    packaged(tmp_path, SHORT, LONG)
    found = load(CUT).decide(32768, 1, 16, "bfloat16")
    assert (found.source, found.plan.path, found.plan.tile) == ("family", "split", "r16")
    assert 20 <= found.plan.partitions <= 38  # 40 / sqrt(2) is 28, as far as waves move it
    assert pieces(32768, found.plan.partitions) == found.plan.partitions
    assert found.reason.startswith(
        "NVIDIA H200 with 132 cores (the shared table nvidia-sm90.json): "
        "split x40 r16 is 3x mlx there, 2"
    )
    assert found.reason.endswith(f", scaled to {found.plan} for these cores")
    assert (found.speedup, found.expected_us) == (None, None)  # nobody measured that here
    assert load(CUT).decide(1024, 1, 16, "bfloat16").plan == MLX
    between = load(CUT).decide(8192, 1, 16, "bfloat16")
    assert between.source == "family"
    assert "between its contexts 1024 and 32768" in between.reason


def test_the_nearest_core_count_lends_first(tmp_path: Path) -> None:
    for cores, plan in (
        (132, SPLIT),
        (72, Plan("split", 16, "r16")),
        (20, Plan("single", 1, "r16")),
    ):
        device = replace(H200, cores=cores, name=f"GPU of {cores}")
        packaged(tmp_path, duel(Shape(32768, 1, 16), plan), device=device)
    packaged(tmp_path, SHORT)
    table = load(CUT)
    assert table.decide(32768, 1, 16, "bfloat16").reason.startswith("GPU of 72 with 72 cores")
    assert table.decide(1024, 1, 16, "bfloat16").reason.startswith("GPU of 132 with 132 cores")


def test_the_next_one_lends_where_a_plan_is_refused(tmp_path: Path, cuda: FakeBackend) -> None:
    packaged(tmp_path, LONG)
    near = replace(H200, memory_gb=80, name="NVIDIA H100")
    packaged(tmp_path, duel(Shape(32768, 1, 16), Plan("split", 32, "r16")), device=near)
    away = replace(H200, memory_gb=81)
    assert load(away).decide(32768, 1, 16, "bfloat16").plan == SPLIT
    cuda.refused = (SPLIT,)
    assert load(away).decide(32768, 1, 16, "bfloat16").plan == Plan("split", 32, "r16")
    cuda.refused = (SPLIT, Plan("split", 32, "r16"))
    found = load(away).decide(32768, 1, 16, "bfloat16")
    assert found.source == "gates"
    step = load(away).explain(32768, 1, 16, "bfloat16")[5]
    assert step.reason.startswith("split x40 r16 is refused; NVIDIA H200 with 132 cores")


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        (replace(H200, family="nvidia-sm100", architecture="sm_100"), KERNEL),
        (H200, "f" * 16),
        (replace(H200, cores=None), KERNEL),
    ],
    ids=["another family", "another kernel", "cores unknown"],
)
def test_nothing_is_lent_across_families_and_kernels(
    tmp_path: Path, device: Device, kernel: str
) -> None:
    packaged(tmp_path, LONG, kernel=kernel)
    found = load(device).explain(32768, 1, 16, "bfloat16")
    assert (found[5].step, found[5].answered) == ("family", False)
    assert found[5].reason == f"no other device of {device.family} is known with this kernel"


def test_what_was_imported_is_lent_too(tmp_path: Path, any_kernel: None) -> None:
    table = table_of(tmp_path / "theirs.db", SHORT, LONG)
    with Store(tmp_path / "ours.db") as store:
        share.into_store(table, store)
    assert (
        load(H200, tmp_path / "ours.db")
        .decide(32768, 1, 16, "bfloat16")
        .reason.startswith("tuned on another NVIDIA H200 (imported)")
    )
    found = load(CUT, tmp_path / "ours.db").decide(32768, 1, 16, "bfloat16")
    assert (found.source, "(imported)" in found.reason) == ("family", True)
    packaged(tmp_path, duel(Shape(65536, 1, 16), SPLIT))  # both are asked
    both = load(H200, tmp_path / "ours.db")
    sources = [both.decide(n, 1, 16, "bfloat16").source for n in (1024, 32768, 49152, 65536)]
    assert sources == ["tuned", "tuned", "fitted", "tuned"]


def test_a_frozen_table_and_off_lend_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(tmp_path, LONG)
    monkeypatch.setenv("MLA_TUNER", "off")
    assert Policy.load(HERE, H200).decide(32768, 1, 16, "bfloat16").source == "off"
    monkeypatch.delenv("MLA_TUNER")
    monkeypatch.setenv("MLA_TUNER_FROZEN", "0" * 12)
    assert Policy.load(HERE, H200).decide(32768, 1, 16, "bfloat16").source == "off"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "{" * 100_000, '{"version": 3}', '{"version": 2, "devices": [1]}', "\0"],
    ids=["empty", "no fields", "a list", "deep", "newer", "no device", "binary"],
)
def test_a_table_that_is_none_is_one_log_line(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    packaged(tmp_path, LONG).write_text(text)
    with caplog.at_level(logging.WARNING, "mla_tuner"):
        assert load(H200).decide(32768, 1, 16, "bfloat16").source == "gates"
    assert len(caplog.messages) == 1
    assert "nvidia-sm90.json is not used: " in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


LAYOUTS = {
    "indent": (r'(?m)^   \{"context"', '    {"context"'),
    "one indent": (r'   \{"context": 32768', '    {"context": 32768'),
    "no space": (r'"heads": ', '"heads":'),
    "a field more": (r', "path": ', ', "more": 1, "path": '),
    "no path": (r', "path": ', ', "way": '),
    "no thresholds": (r'\n  "thresholds": ', '\n  "more": '),
    "a line": (r"\n", ""),
    "devices": (r'"devices": \[(?s:.*)\]', '"devices": {}'),
    "another family": (r'"family": "nvidia-sm90"', '"family": "nvidia-sm80"'),
}


@pytest.mark.parametrize(("found", "instead"), LAYOUTS.values(), ids=LAYOUTS)
def test_no_bucket_of_another_layout_is_lost_without_a_word(
    tmp_path: Path, found: str, instead: str, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON that says the same, or nearly: buckets are found by their bytes."""
    path = packaged(tmp_path, SHORT, LONG)
    path.write_text(re.sub(found, lambda _: instead, path.read_text()))
    assert load(H200).decide(32768, 1, 16, "bfloat16").source == "gates"
    assert len(caplog.messages) == 1
    assert "nvidia-sm90.json is not used: " in caplog.messages[0]


@pytest.mark.parametrize(
    "heads", [10**5000, -(10**5000), 0, "16"], ids=["huge", "hugely negative", "none", "a text"]
)
def test_what_is_no_head_count_finds_nothing(tmp_path: Path, heads: Any) -> None:
    packaged(tmp_path, LONG)
    assert load(H200).decide(32768, 1, heads, "bfloat16").plan == MLX


def test_many_devices_take_no_longer_each(tmp_path: Path) -> None:
    """Ended by a fault after all of them were read: quadratic work would take minutes."""
    text = '{"version": 2, "family": "nvidia-sm90", "devices": [' + '\n  "buckets": [' * 500_000
    packaged(tmp_path, LONG).write_text(text)
    assert load(H200).decide(32768, 1, 16, "bfloat16").source == "gates"


@pytest.mark.parametrize("device", [H200, CUT], ids=["a twin", "another"])
def test_a_bad_bucket_is_said_once(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    path = packaged(tmp_path, SHORT, LONG)
    path.write_text(
        path.read_text().replace('"speedup": 3.0, "speedup_low"', '"speedup": -3, "speedup_low"')
    )
    table = load(device)
    for context in (1024, 4096, 32768):
        for batch in (1, 2, 3):
            table.decide(context, batch, 16, "bfloat16")
            table.explain(context, batch, 16, "bfloat16")
    assert len(caplog.messages) == 1
    assert "is left out: expected column speedup" in caplog.messages[0]


def test_the_steps_say_whose_buckets_they_are(tmp_path: Path) -> None:
    packaged(tmp_path, SHORT, LONG)
    where = "on another NVIDIA H200 (the shared table nvidia-sm90.json)"
    table = load(H200)
    tuned = table.explain(32768, 1, 16, "bfloat16")[3]
    assert where in tuned.reason
    assert tuned.details == ("there single was not measured", "there split is 3x mlx")
    steps = table.explain(8192, 1, 16, "bfloat16")
    assert steps[3].reason.endswith("is not tuned; 0 others are, 2 on other devices like this")
    assert (
        f"between tuned contexts 1024 (mlx) and 32768 (split x40 r16), {where}" in steps[4].reason
    )
    with Store(tmp_path / "own.db") as store:
        run = start(store)
        for found in (SHORT, LONG):
            store.record(run, found[0].shape.bucket, found, found)
    own = Policy.load(tmp_path / "own.db", H200).explain(8192, 1, 16, "bfloat16")
    assert "another" not in own[4].reason
    packaged(tmp_path, duel(Shape(32768, 4, 16), Plan("split", 10, "r16")))
    cut = load(H200).decide(32768, 3, 16, "bfloat16")
    assert where in cut.reason


def test_a_family_with_a_path_in_its_name_reads_no_file(tmp_path: Path) -> None:
    packaged(tmp_path, LONG)
    assert family.load(replace(H200, family="../tuning_db/nvidia-sm90"), KERNEL, HERE) == []


@pytest.mark.parametrize("ours", [1, 2, 7, 20, 66, 131, 144, 1000])
@pytest.mark.parametrize("context", [1024, 4096, 98304, 1 << 20])
def test_scaled_counts_are_real_and_near_the_law(ours: int, context: int) -> None:
    bucket = Shape(context, 2, 16).bucket
    theirs = Plan("split", pieces(context, 40), "r16")
    found = family.scaled(theirs, bucket, 132, ours)
    assert pieces(context, found.partitions) == found.partitions
    law = theirs.partitions * (ours / 132) ** 0.5
    finest = min(256, pieces(context, 256))
    assert found.partitions <= max(2, min(finest, 1.3 * law + 1))
    assert found.partitions >= min(finest, max(2, law / 1.3 - 1))
    assert family.scaled(theirs, bucket, 132, 132) == theirs
    assert family.scaled(Plan("single", 1, "r16"), bucket, 132, ours) == Plan("single", 1, "r16")


def test_plan_explains_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, LONG)
    monkeypatch.setattr(devices, "probe", lambda choice: CUT)
    monkeypatch.setattr(devices, "use", lambda device: None)
    args = ("plan", "--context", "32768", "--heads", "16", "--db", str(tmp_path / "none.db"))
    found = answer(*args, "--explain")
    assert (found["source"], found["path"]) == ("family", "split")
    assert [step["step"] for step in found["steps"] if step["answered"]] == ["family"]
    assert "NVIDIA H200 with 132 cores" in run(*args).stdout.replace("\n", " ")


# --- size ----------------------------------------------------------------------------------------


def large(path: Path, rows: int) -> list[Bucket]:
    """A table of so many buckets, made of the lines of a small one."""
    lines = path.read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith('   {"context": '))
    bucket, entry = lines[start], lines[start + 1].rstrip(",")
    kinds = [(b, h, q, d) for d in ("bfloat16", "float16") for q in (1, 2, 4, 8)
             for h in range(1, 129) for b in (1, 2, 4, 8)]  # fmt: skip
    made, buckets = [], []
    for batch, heads, q_len, dtype in kinds:
        for context in CONTEXT_GRID[10:15]:
            line = bucket.replace('"context": 32768, "batch": 1, "heads": 16, "dtype": "bfloat16"',
                                  f'"context": {context}, "batch": {batch}, "heads": {heads}, '
                                  f'"dtype": "{dtype}"')  # fmt: skip
            made.append(line.replace('"q_len": 1', f'"q_len": {q_len}') + "\n" + entry)
            buckets.append(Shape(context, batch, heads, dtype, q_len=q_len).bucket)
    assert len(buckets) >= rows
    path.write_text("\n".join([*lines[:start], ",\n".join(made[:rows]), *lines[start + 2 :]]))
    return buckets[:rows]


def test_twenty_thousand_buckets_load_as_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is read before it is asked for; `pytest -s` shows what that takes."""
    read: list[object] = []
    checked = family.checked_row
    monkeypatch.setattr(family, "checked_row", lambda raw: read.append(raw) or checked(raw))
    path = packaged(tmp_path, LONG)
    buckets = large(path, 20_000)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        table = Policy.load(tmp_path / "none.db", H200)
        took.append(time.perf_counter() - began)
    print(f"loaded in {min(took) * 1e3:.1f} ms")
    assert not read
    for bucket in (buckets[0], buckets[9_999], buckets[-1]):
        found = table.decide(*bucket[:4], bucket.q_len)
        assert (found.source, found.plan) == ("tuned", SPLIT)
    one = buckets[0][:4]
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10_000):
            table.decide(*one)
        rounds.append((time.perf_counter() - began) / 10_000)
    print(f"a look-up takes {min(rounds) * 1e6:.2f} us")


COMMITTED = sorted((Path(__file__).parents[1] / "tuning_db").glob("*-*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_a_committed_table_decides_on_a_device_like_its_own(
    path: Path, cuda: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket of it; the look-up reads what `share check` has found to be in order."""
    monkeypatch.setattr(family, "FOLDERS", (path.parent,))
    table = share.read(path)
    for theirs in table.devices:
        names = ("backend", "architecture", "cores", "memory_gb", "name", "cache_bytes")
        here = Device(family=table.family, **{name: getattr(theirs, name) for name in names})
        cuda.name, cuda.kernel = theirs.backend, theirs.kernel
        monkeypatch.setattr(policy, "MLX_VERSION", theirs.mlx)
        monkeypatch.setattr(devices, "system_version", lambda system=theirs.system: system)
        found = Policy.load(HERE, here)
        for shared in theirs.buckets:
            b = shared.bucket
            asked = (b.context, b.batch, b.heads, b.dtype, b.q_len, b.geometry, b.layout)
            decision = found.decide(*asked)
            assert decision.source == "tuned"
            assert (decision.plan, decision.speedup) == (shared.plan, shared.speedup)


def test_the_whole_way_from_a_database(tmp_path: Path) -> None:
    with fill(tmp_path / "t.db") as store:
        share.export(store, tmp_path / "tuning_db")
    assert load(H200).decide(8192, 1, 128, "bfloat16").plan == Plan("single", 1, "r64w")
