"""Shared tables: written from a database, one text a table, and refused when they lie."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import answer, error, run
from share_tables import (
    H200,
    OPTIONS,
    SOFTWARE,
    SPLIT,
    duel,
    fill,
    start,
    table,
    table_of,
)

from mla_tuner import backends, family, share
from mla_tuner.device import Device
from mla_tuner.errors import ShareError
from mla_tuner.plan import MLX
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.share_format import (
    SharedBest,
    SharedBucket,
    SharedDevice,
    SharedEntry,
    SharedRun,
    SharedTable,
    SharedThreshold,
)
from mla_tuner.store import Store

FOLDER = Path(__file__).parent.parent / "tuning_db"
FILES = sorted(path for path in FOLDER.glob("*.json") if path.name != share.SCHEMA_NAME)
__all__ = ["table"]  # the fixture


# --- export --------------------------------------------------------------------------------------


def test_an_export_holds_winners_with_their_provenance(table: Path) -> None:
    assert table.name == "nvidia-sm90.json"
    data = json.loads(table.read_text())
    assert (data["version"], data["family"]) == (2, "nvidia-sm90")
    (device,) = data["devices"]
    assert (device["key"], device["name"]) == ("cuda/sm_90/132c/140gb", "NVIDIA H200")
    assert (device["cores"], device["memory_gb"]) == (132, 140)
    assert (device["kernel"], device["mlx"]) == ("0123456789abcdef", "0.32.4")
    assert device["system"] == "Ubuntu 24.04, driver 580.1"
    (run,) = device["runs"]
    assert (run["options"], run["clock"]) == (OPTIONS, "gpu")
    assert run["software"]["driver"] == "580.1"
    first, _, last = device["buckets"]
    assert [first["context"], first["path"], first["speedup"]] == [1024, "mlx", 1.0]
    assert [last["context"], last["partitions"], last["tile"]] == [32768, 40, "r16"]
    assert (last["median_us"], last["rounds"]) == (41.09, 19)
    assert (last["baseline"], last["baseline_us"]) == ("mlx", 123.4)
    assert (last["speedup_low"], last["speedup_high"]) == (2.997, 3.003)
    assert last["split_speedup"] == 3.0
    assert [each["split_from"] for each in device["thresholds"] if each["heads"] == 16]
    (entry,) = last["evidence"]
    assert (entry["run"], entry["baseline"], entry["failed"]) == (run["id"], "mlx", "")
    assert len(entry["samples_us"]) == len(entry["baseline_samples_us"]) == 19
    assert entry["best"] == [{"path": "split", "partitions": 40, "tile": "r16", "speedup": 3.0}]


def test_nothing_in_it_tells_whose_machine_it_was(table: Path) -> None:
    text = table.read_text()
    assert "somebody" not in text
    assert "/data" not in text


def test_a_line_is_a_bucket_or_an_entry(table: Path) -> None:
    lines = table.read_text().splitlines()
    buckets = [line for line in lines if line.startswith('   {"context": ')]
    entries = [line for line in lines if line.startswith('    {"run": ')]
    assert len(buckets) == len(entries) == 3
    assert all(json.loads(line + "]}") for line in buckets)


def test_an_export_passes_its_own_check_and_is_always_the_same(table: Path, tmp_path: Path) -> None:
    assert share.check(table) == []
    with Store(tmp_path / "t.db") as store:
        share.export(store, tmp_path / "again")
    assert (tmp_path / "again" / table.name).read_text() == table.read_text()
    assert (tmp_path / "again" / "schema.json").read_text() == share.schema()


def test_only_the_last_versions_of_a_device_are_written(tmp_path: Path) -> None:
    fill(tmp_path / "t.db", kernel="f" * 16).close()
    with fill(tmp_path / "t.db") as store:
        (path,) = share.export(store, tmp_path)
    (device,) = json.loads(path.read_text())["devices"]
    assert device["kernel"] == "0123456789abcdef"
    assert len(device["runs"]) == 1


def test_devices_of_a_family_share_a_file_and_families_do_not(tmp_path: Path) -> None:
    other = Device("metal", "applegpu_g16s", "apple-m4", 40, 48, "Apple M4 Max", 48 << 20)
    fill(tmp_path / "t.db").close()
    fill(tmp_path / "t.db", replace(H200, memory_gb=80, name="NVIDIA H100")).close()
    with Store(tmp_path / "t.db") as store:
        (path,) = share.export(store, tmp_path)
        keys = [each["key"] for each in json.loads(path.read_text())["devices"]]
        assert keys == ["cuda/sm_90/132c/140gb", "cuda/sm_90/132c/80gb"]
        shape = Shape(1024, 1, 16)
        run = store.start_run(other, kernel="a" * 16, software=SOFTWARE, options=OPTIONS)
        store.record(run, shape.bucket, duel(shape, MLX), duel(shape, MLX))
        names = [each.name for each in share.export(store, tmp_path)]
    assert names == ["apple-m4.json", "nvidia-sm90.json"]


def test_a_refuted_winner_speaks_against_its_plan(tmp_path: Path) -> None:
    with fill(tmp_path / "t.db") as store:
        run = start(store, command="verify")
        shape = Shape(32768, 1, 16)
        store.record(run, shape.bucket, (), duel(shape, SPLIT, 0.5), refutes=True)
        (path,) = share.export(store, tmp_path)
    (device,) = json.loads(path.read_text())["devices"]
    last = device["buckets"][-1]
    assert (last["context"], last["path"], len(last["evidence"])) == (32768, "mlx", 2)
    assert share.check(path) == []


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_a_run_on_a_gpu_of_two_clocks_must_say_which(tmp_path: Path, backend: str) -> None:
    m4 = Device("metal", "applegpu_g16s", "apple-m4", 40, 48, "Apple M4 Max", 48 << 20)
    device, shape = H200 if backend == "cuda" else m4, Shape(1024, 1, 16)
    versions = {"kernel": "a" * 16, "software": SOFTWARE, "options": OPTIONS}
    with Store(tmp_path / "t.db") as store:
        store.start_run(device, **versions)  # type: ignore[arg-type]  # it timed nothing
        known = {"clock": "gpu"} if backend == "cuda" else {}
        run = store.start_run(device, **versions, conditions=known)  # type: ignore[arg-type]
        store.record(run, shape.bucket, duel(shape, MLX), duel(shape, MLX))
        (path,) = share.export(store, tmp_path)
        (shared,) = json.loads(path.read_text())["devices"]
        assert [each["clock"] for each in shared["runs"]] == [known.get("clock", "wall")]
        run = store.start_run(device, **versions, conditions={})  # type: ignore[arg-type]
        store.record(run, shape.bucket, duel(shape, MLX), duel(shape, MLX))
        if backend == "cuda":
            with pytest.raises(ShareError, match="does not say by which clock it timed"):
                share.export(store, tmp_path)
        else:
            assert len(share.export(store, tmp_path)) == 1


def test_what_would_not_pass_is_not_written(tmp_path: Path) -> None:
    wrong = replace(H200, name="/home/somebody's GPU")
    with fill(tmp_path / "t.db", wrong) as store, pytest.raises(ShareError, match="a path"):
        share.export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_database_and_a_full_disk_are_said(tmp_path: Path) -> None:
    with Store(tmp_path / "t.db") as store, pytest.raises(ShareError, match="holds no winners"):
        share.export(store, tmp_path)
    (tmp_path / "file").touch()
    with fill(tmp_path / "u.db") as store, pytest.raises(ShareError, match="cannot write"):
        share.export(store, tmp_path / "file")


# --- check ---------------------------------------------------------------------------------------


def changed(table: Path, **values: Any) -> list[str]:
    """The faults after the last bucket was changed, and written as the export would."""
    data = json.loads(table.read_text())
    data["devices"][0]["buckets"][-1].update(values)
    return faults_of(table, data)


def faults_of(table: Path, data: dict[str, Any]) -> list[str]:
    try:
        text = share.render(share.SharedTable.model_validate(data))
    except ValueError:
        text = json.dumps(data)
    table.write_text(text)
    return share.check(table)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"path": "fast"}, "expected path in"),
        ({"partitions": 300}, "expected partitions in 2..256"),
        ({"partitions": 1 << 50}, "less than or equal to"),
        ({"partitions": 2.0}, "valid integer"),
        ({"partitions": "40"}, "valid integer"),
        ({"tile": "r16x"}, "the CUDA kernels' tiles are"),
        ({"tile": "r8f"}, "the simple kernel does not compute in bfloat16"),
        ({"dtype": "int8"}, "dtype"),
        ({"context": 33000}, "no bucket"),
        ({"partitions": 255}, "pieces"),
        ({"speedup_low": 1.01}, "the interval begins at 1.01: it must clear 1.02"),
        ({"speedup_low": None}, "the interval begins at None"),
        ({"speedup": 4.0}, "speedup: it is 4.0, the evidence makes it 3.0"),
        ({"speedup": float("nan")}, "finite number"),
        ({"median_us": -1.0}, "greater than or equal to 0.001"),
        ({"rounds": 5}, "rounds: it is 5, the evidence makes it 19"),
        ({"day": "2020-01-01"}, "day: it is 2020-01-01, the evidence makes it 2"),
        ({"baseline": "single"}, "baseline: it is single, the evidence makes it mlx"),
        ({"evidence": []}, "evidence: Tuple should have at least 1 item"),
        ({"note": "mine"}, "Extra inputs are not permitted"),
        ({"path": "mlx", "partitions": 1, "tile": ""}, "path: it is mlx, the evidence makes it"),
    ],
)
def test_a_bucket_that_lies_is_found(table: Path, values: dict[str, Any], fault: str) -> None:
    found = changed(table, **values)
    assert found
    assert all(line.startswith("nvidia-sm90.json: ") for line in found)
    assert fault in " ".join(found)
    assert ": devices.0.buckets.2." in found[0]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"run": "f" * 16}, "run: ffffffffffffffff is none of the device's runs"),
        ({"run": "../../etc"}, "run: String should match pattern"),
        ({"day": "2026-13-45"}, "day: 2026-13-45 is no day"),
        ({"day": "2020-01-01"}, "day: 2020-01-01 is before its run"),
        ({"partitions": 300}, "partitions: expected partitions in 2..256"),
        ({"partitions": 255}, "partitions: context 32768 is not cut in so many pieces"),
        ({"samples_us": [1.0, "2"]}, "samples_us.1: Input should be a valid number"),
        ({"samples_us": [1e300]}, "samples_us.0: Input should be less than"),
        ({"samples_us": [1.0] * 5000}, "samples_us: Tuple should have at most 4096 items"),
        ({"baseline_samples_us": []}, "samples_us without baseline_samples_us"),
        ({"failed": "error"}, "samples_us of a plan that failed"),
        ({"failed": "slow"}, "failed: Input should be"),
        ({"baseline": "split"}, "baseline: Input should be"),
        ({"best": [{}]}, "best.0.path: Field required"),
    ],
)
def test_an_entry_that_lies_is_found(table: Path, values: dict[str, Any], fault: str) -> None:
    data = json.loads(table.read_text())
    data["devices"][0]["buckets"][-1]["evidence"][0].update(values)
    found = faults_of(table, data)
    assert ": devices.0.buckets.2.evidence.0" in found[0]
    assert fault in found[0]


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("key", "cuda/sm_90/144c/140gb", "expected the key cuda/sm_90/132c/140gb"),
        ("kernel", "", "String should match"),
        ("system", "", "at least 1 character"),
        ("runs", [], "at least 1 item"),
        ("buckets", [], "at least 1 item"),
        ("name", "C:\\Users\\me", "a path"),
        ("name", "GPU of me@example.com", "an address"),
        ("name", "~/gpu", "a path"),
        ("name", "me@3.2GHz-box", "an address"),
        ("name", "me@10.0.0.1MHz.org", "an address"),
        ("name", "Xeon @ 2.0GHz of me@home", "an address"),
        ("backend", "opencl", "Input should be"),
        ("cores", None, "expected the key cuda/sm_90/?c/140gb"),
    ],
)
def test_a_device_that_lies_is_found(table: Path, field: str, value: Any, fault: str) -> None:
    data = json.loads(table.read_text())
    data["devices"][0][field] = value
    assert fault in " ".join(faults_of(table, data))


@pytest.mark.parametrize(
    "name",
    [
        "Intel(R) Xeon(R) Processor @ 2.00GHz",
        "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz",
        "Pentium(R) III CPU @ 800 MHz",
        "Genuine Intel(R) CPU 0000%@",
        "ZHAOXIN KaiXian KX-6640MA@2.2+GHz",
        "AMD Ryzen 7 PRO 4750U with Radeon Graphics",
        "AMD EPYC 7B13",
        "Apple M3 Max",
    ],
)
def test_what_chips_are_called_tells_nothing_of_their_owner(tmp_path: Path, name: str) -> None:
    """No CPU of Intel's that names its clock could be shared."""
    device = replace(H200, name=name)
    found = table_of(tmp_path / "t.db", duel(Shape(32768, 1, 16), SPLIT), device=device)
    written = share.write(found, tmp_path / "nvidia-sm90.json")
    assert share.read(written).devices[0].name == name


def test_provenance_is_needed_and_can_not_be_changed(table: Path) -> None:
    data = json.loads(table.read_text())
    run = data["devices"][0]["runs"][0]
    run["day"] = "2020-01-01"
    assert "devices.0.runs.0.id: " in faults_of(table, data)[0]
    assert "is not the digest of what it says" in faults_of(table, data)[0]
    del run["software"]["mlx"]
    assert "devices.0.runs.0: it lacks mlx" in " ".join(faults_of(table, data))


def test_thresholds_follow_from_the_winners(table: Path) -> None:
    data = json.loads(table.read_text())
    data["devices"][0]["thresholds"][0]["split_from"] = 5
    assert "devices.0.thresholds: they are not what the winners make" in faults_of(table, data)[0]


def test_order_and_layout_are_fixed(table: Path) -> None:
    data = json.loads(table.read_text())
    data["devices"][0]["buckets"].reverse()
    assert "buckets: they are not in order" in " ".join(faults_of(table, data))
    data["devices"][0]["buckets"][-1] = data["devices"][0]["buckets"][0]
    assert "there twice" in " ".join(faults_of(table, data))
    data["devices"] *= 2
    assert "is there twice with the same versions" in " ".join(faults_of(table, data))


def test_another_layout_of_the_same_table_is_found(table: Path) -> None:
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join([*lines[:4], "\n", *lines[4:]]))
    assert share.check(table) == [
        "nvidia-sm90.json: order or layout is not that of `mla-tune share export`: line 5"
    ]


def test_a_file_is_named_after_its_family(table: Path) -> None:
    other = table.rename(table.with_name("nvidia-sm100.json"))
    assert share.check(other) == ["nvidia-sm100.json: expected the family's name, nvidia-sm90.json"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[]", "the file: Input should be"),
        (b'{"version": 2}', "family: Field required"),
        (b'{"version": 1}', "version: it is 1, this reads 2: export it again"),
        (b'{"version": 3}', "version: it is 3, this reads 2: that takes a newer mla-tuner"),
        (b'{"version": "2"}', "version: Input should be 2"),
    ],
)
def test_what_is_no_table_is_said(table: Path, data: bytes, fault: str) -> None:
    table.write_bytes(data)
    assert fault in share.check(table)[0]


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    assert share.check(tmp_path / "none.json") == ["none.json: No such file or directory"]


# --- what is in the repository -------------------------------------------------------------------


def test_the_schema_beside_the_tables_is_that_of_the_model() -> None:
    assert (FOLDER / share.SCHEMA_NAME).read_text() == share.schema()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_table_of_the_repository_can_be_relied_on(path: Path) -> None:
    assert share.check(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_table_of_the_repository_is_of_the_kernels_as_they_are(path: Path) -> None:
    """Else serving passes over all of it: it has to be measured again."""
    for device in share.read(path).devices:
        if device.backend != "cpu":  # whose kernels are texts, the same on every machine
            assert device.kernel == backends.get(device.backend).digest()


def test_the_readme_names_every_field() -> None:
    text = (FOLDER / "README.md").read_text()
    models = (SharedTable, SharedDevice, SharedRun, SharedBucket, SharedEntry, SharedBest)
    for model in (*models, SharedThreshold):
        for name in model.model_fields:
            assert re.search(rf"`{name}`", text), name


# --- the commands --------------------------------------------------------------------------------


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    fill(tmp_path / "t.db").close()
    out = tmp_path / "out"
    found = answer("share", "export", "--folder", str(out), "--db", str(tmp_path / "t.db"))
    assert found == {"files": [str(out / "nvidia-sm90.json")]}
    assert "1 checked, nothing is wrong" in run("share", "check", "--folder", str(out)).stdout
    (out / "nvidia-sm90.json").write_text("{}")
    result = run("share", "check", "--folder", str(out), code=1)
    assert "nvidia-sm90.json: version: Field required" in result.stdout
    assert "can't be relied on" in result.stderr
    assert "no database" in error("share", "export", "--db", str(tmp_path / "none.db"))


def test_an_export_keeps_what_others_measured(tmp_path: Path) -> None:
    """It writes over what it wrote, and over nothing that the database lacks."""
    fill(tmp_path / "theirs.db", seed=1).close()
    fill(tmp_path / "ours.db").close()
    folder = ("--folder", str(tmp_path / "out"))
    run("share", "export", *folder, "--db", str(tmp_path / "theirs.db"))
    before = (tmp_path / "out" / "nvidia-sm90.json").read_text()
    line = error("share", "export", *folder, "--db", str(tmp_path / "ours.db"))
    assert "nvidia-sm90.json holds evidence that" in line
    assert "`mla-tune share contribute` adds to it" in line
    assert (tmp_path / "out" / "nvidia-sm90.json").read_text() == before
    fill(tmp_path / "theirs.db", seed=2).close()
    run("share", "export", *folder, "--db", str(tmp_path / "theirs.db"))
    assert len(share.read(tmp_path / "out" / "nvidia-sm90.json").devices[0].runs) == 2


def test_a_check_of_no_folder_is_no_success(tmp_path: Path) -> None:
    assert error("share", "check", "--folder", str(tmp_path / "tunig_db")).startswith("no folder ")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(family.MAX_BYTES + 1)
    for name, fault in (("pipe", "it is a pipe"), ("zero", "a device"), ("large", "more than 64")):
        path = tmp_path / f"{name}.json"
        (line,) = share.check(path)
        assert line.startswith(f"{name}.json: ")
        assert fault in line
        assert error("share", "import", str(path), "--db", str(tmp_path / "t.db")) == line


def test_nothing_is_imported_for_it_in_serving() -> None:
    code = "import mla_tuner, mla_tuner.policy, sys; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_bucket_keeps_its_identity(table: Path) -> None:
    text = table.read_text()
    device = share.SharedTable.model_validate(json.loads(text)).devices[0]
    assert device.buckets[-1].bucket == Shape(32768, 1, 16).bucket
    assert isinstance(device.buckets[-1].bucket, Bucket)
    assert device.buckets[-1].plan == SPLIT
