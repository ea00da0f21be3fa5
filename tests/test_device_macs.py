"""Macs as devices: what they answer, and what follows for their key, their family and the gates.

No answer was recorded on the machine that it is named after: see fixtures/macs/README.md.
"""

from __future__ import annotations

import json
import plistlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fakes import FakeBackend

from mla_tuner import device, gates
from mla_tuner.backends import metal_tiles
from mla_tuner.candidates import busy, candidates, pieces, row_groups
from mla_tuner.device import Device, System
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import MAX_PARTITIONS, Bucket, Shape, bucket_of
from tools.replay.devices import apples

MACS = Path(__file__).parent / "fixtures" / "macs"
IOREG = ["ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator"]
GB = 1 << 30

# Name, architecture, GPU cores by bin and memory in GB, as listed in public tables.
CHIPS = [
    ("Apple M1", "applegpu_g13g", (7, 8), (8, 16)),
    ("Apple M1 Pro", "applegpu_g13s", (14, 16), (16, 32)),
    ("Apple M1 Max", "applegpu_g13s", (24, 32), (32, 64)),
    ("Apple M1 Ultra", "applegpu_g13d", (48, 64), (64, 128)),
    ("Apple M2", "applegpu_g14g", (8, 10), (8, 16, 24)),
    ("Apple M2 Pro", "applegpu_g14s", (16, 19), (16, 32)),
    ("Apple M2 Max", "applegpu_g14s", (30, 38), (32, 64, 96)),
    ("Apple M2 Ultra", "applegpu_g14d", (60, 76), (64, 128, 192)),
    ("Apple M3", "applegpu_g15g", (8, 10), (8, 16, 24)),
    ("Apple M3 Pro", "applegpu_g15s", (14, 18), (18, 36)),
    ("Apple M3 Max", "applegpu_g15s", (30, 40), (36, 48, 64, 96, 128)),
    ("Apple M3 Ultra", "applegpu_g15d", (60, 80), (96, 256, 512)),
    ("Apple M4", "applegpu_g16g", (8, 10), (16, 24, 32)),
    ("Apple M4 Pro", "applegpu_g16s", (16, 20), (24, 48, 64)),
    ("Apple M4 Max", "applegpu_g16s", (32, 40), (36, 48, 64, 128)),
    ("Apple M5", "applegpu_g17g", (8, 10), (16, 24, 32)),
    ("Apple M5 Pro", "applegpu_g17s", (16, 20), (24, 48, 64)),
    ("Apple M5 Max", "applegpu_g17s", (32, 40), (36, 48, 64, 128)),
]
NAMES = [name for name, *_ in CHIPS]


class MetalBackend(FakeBackend):
    """Metal's tiles on a machine that need not have Metal."""

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return metal_tiles.useful(shape)


def mac(registry: bytes) -> System:
    """A Mac whose registry gives that answer, and which has no other command."""

    def run(command: Sequence[str]) -> bytes:
        return registry if list(command) == IOREG else b""

    return System("darwin", "arm64", Path("/nonexistent"), lambda: 10, run)


def recorded(name: str, registry: str = "") -> Device:
    info = json.loads((MACS / f"{name}.json").read_text())
    return device.metal_device(info, mac((MACS / (registry or f"{name}.plist")).read_bytes()))


def simulated(name: str, architecture: str, cores: int, memory_gb: int) -> Device:
    info = {"device_name": name, "architecture": architecture, "memory_size": memory_gb * GB}
    return device.metal_device(info, mac(plistlib.dumps([{"gpu-core-count": cores}])))


# --- what Macs answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "family"),
    [
        ("m1", "metal/applegpu_g13g/7c/8gb", "apple-m1"),
        ("m1-ultra", "metal/applegpu_g13d/64c/128gb", "apple-m1"),
        ("m2-max", "metal/applegpu_g14s/38c/96gb", "apple-m2"),
        ("m3-pro", "metal/applegpu_g15s/18c/36gb", "apple-m3"),
        ("m3-ultra", "metal/applegpu_g15d/80c/512gb", "apple-m3"),
        ("m4", "metal/applegpu_g16g/10c/16gb", "apple-m4"),
        ("m4-max", "metal/applegpu_g16s/32c/36gb", "apple-m4"),
        ("m5-max", "metal/applegpu_g17s/40c/64gb", "apple-m5"),
        ("virtual", "metal/air64_v27/?c/7gb", "apple-air64_v27"),
    ],
)
def test_a_mac_is_known_by_its_answers(name: str, key: str, family: str) -> None:
    found = recorded(name)
    assert (found.key, found.family) == (key, family)
    assert found.name == json.loads((MACS / f"{name}.json").read_text())["device_name"]


@pytest.mark.parametrize(
    ("registry", "cores"),
    [
        ("m5-max.plist", 40),
        ("shape-as-data.plist", 40),
        ("shape-nested.plist", 40),
        ("shape-two-entries.plist", 40),
        ("shape-two-counts.plist", None),
        ("shape-no-count.plist", None),
        ("shape-as-text.plist", None),
        ("shape-cut.plist", None),
        ("shape-tree.txt", None),
        ("virtual.plist", None),
        ("README.md", None),
    ],
)
def test_the_core_count_is_found_or_unknown(registry: str, cores: int | None) -> None:
    assert recorded("m5-max", registry).cores == cores


def test_every_fixture_is_used() -> None:
    used = set(Path(__file__).read_text().split('"'))
    stems = {path.name for path in MACS.iterdir() if path.name.startswith("shape-")}
    stems |= {path.stem for path in MACS.glob("*.json")}
    assert stems <= used


@pytest.mark.parametrize("count", [0, -1, 1024, 2**63, True, 40.0, "40", b"", b"\xff" * 8, [40]])
def test_a_count_that_cannot_be_is_unknown(count: object) -> None:
    assert device.metal_device({"device_name": "Apple M4"}, _answering(count)).cores is None


@pytest.mark.parametrize("count", [40, b"\x28\0\0\0", b"\x28" + bytes(7)])
@pytest.mark.parametrize("form", [plistlib.FMT_XML, plistlib.FMT_BINARY])
def test_numbers_come_as_numbers_or_bytes(count: object, form: plistlib.PlistFormat) -> None:
    assert device.metal_device({"device_name": "Apple M4"}, _answering(count, form)).cores == 40


def _answering(count: object, form: plistlib.PlistFormat = plistlib.FMT_XML) -> System:
    return mac(plistlib.dumps([{"gpu-core-count": count}], fmt=form))


def test_one_accelerator_listed_twice_is_no_contradiction() -> None:
    entry = {"gpu-core-count": 20}
    answer = plistlib.dumps([{**entry, "IORegistryEntryChildren": [entry]}, entry])
    assert device.metal_device({"device_name": "Apple M4 Pro"}, mac(answer)).cores == 20


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"\0" * 100,
        b"bplist00" + bytes(40),
        b"<plist/>",
        b"<plist><integer>40</integer></plist>",
        b"ioreg: illegal option -- a\nusage: ioreg [-abfilrtxy]\n",
        plistlib.dumps([]),
        plistlib.dumps({}),
        plistlib.dumps([[], {}, "AGXAccelerator", 40]),
        b"<plist>" + b"<array>" * 5000 + b"</array>" * 5000 + b"</plist>",
        "<plist>Größe</plist>".encode("latin-1"),
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_garbage_is_an_unknown_count_and_no_error(answer: bytes) -> None:
    assert device.metal_device({"device_name": "Apple M4"}, mac(answer)).cores is None


@pytest.mark.parametrize(
    "failure", [FileNotFoundError(2, "ioreg"), PermissionError(), subprocess.TimeoutExpired("", 5)]
)
def test_an_ioreg_that_fails_is_an_unknown_count(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **options: object) -> None:
        raise failure

    monkeypatch.setattr(device.subprocess, "run", run)
    here = System("darwin", "arm64", Path("/nonexistent"), lambda: 10)
    assert device.metal_device({"device_name": "Apple M4"}, here).cores is None


@pytest.mark.parametrize("path", ["", "/nowhere", None])
def test_commands_are_found_whatever_the_path(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a server started with a short PATH would not find its own device's plans."""
    folders: list[str] = []

    def run(command: Sequence[str], *, env: Mapping[str, str], **options: object) -> None:
        folders.extend(env["PATH"].split(":"))
        raise FileNotFoundError

    monkeypatch.setattr(device.subprocess, "run", run)
    monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
    assert device.metal_device({"device_name": "Apple M4"}).cores is None
    assert "/usr/sbin" in folders
    assert path is None or folders[0] == path


@pytest.mark.parametrize(
    ("info", "key", "family"),
    [
        ({}, "metal/unknown/8c/1gb", "apple-m4"),
        ({"architecture": ""}, "metal/unknown/8c/1gb", "apple-m4"),
        ({"architecture": None, "memory_size": None}, "metal/unknown/8c/1gb", "apple-m4"),
        ({"memory_size": "lots"}, "metal/unknown/8c/1gb", "apple-m4"),
        ({"device_name": "Apple M12 Ultra"}, "metal/unknown/8c/1gb", "apple-m12"),
        ({"device_name": "Apple A18 Pro GPU"}, "metal/unknown/8c/1gb", "apple-a18"),
        ({"device_name": "Apple GPU"}, "metal/unknown/8c/1gb", "apple-unknown"),
        (
            {"device_name": "Apple GPU", "architecture": "applegpu_g18s"},
            "metal/applegpu_g18s/8c/1gb",
            "apple-applegpu_g18s",
        ),
    ],
)
def test_what_mlx_leaves_out_is_unknown(info: dict[str, object], key: str, family: str) -> None:
    found = device.metal_device({"device_name": "Apple M4", **info}, _answering(8))
    assert (found.key, found.family) == (key, family)


def test_the_front_door_finds_the_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    info = json.loads((MACS / "m4-max.json").read_text())
    monkeypatch.setattr(device.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(device.mx, "device_info", lambda _: info)
    found = device.probe("metal", mac((MACS / "m4-max.plist").read_bytes()))
    assert found == recorded("m4-max")


# --- chips that are sold -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "architecture", "bins", "memories"), CHIPS, ids=NAMES)
def test_family_and_key_of_every_chip(
    name: str, architecture: str, bins: tuple[int, ...], memories: tuple[int, ...]
) -> None:
    for cores in bins:
        for memory_gb in memories:
            found = simulated(name, architecture, cores, memory_gb)
            assert found.family == f"apple-{name.split()[1].lower()}"
            assert found.key == f"metal/{architecture}/{cores}c/{memory_gb}gb"
            assert found.cache_bytes == device.APPLE_CACHE_BYTES


def test_no_two_macs_share_a_key() -> None:
    """Cores and memory alone would: 10 cores with 24 GB are sold as M2, M3, M4 and M5."""
    sold = [
        (name, cores, simulated(name, architecture, cores, memory_gb))
        for name, architecture, bins, memories in CHIPS
        for cores in bins
        for memory_gb in memories
    ]
    assert len({found.key for *_, found in sold}) == len(sold)
    alike = [found.family for _, _, found in sold if (found.cores, found.memory_gb) == (10, 24)]
    assert alike == ["apple-m2", "apple-m3", "apple-m4", "apple-m5"]


def test_simulated_hardware_is_what_the_probe_would_find() -> None:
    known = {
        (architecture, f"apple-{name.split()[1].lower()}", cores)
        for name, architecture, bins, _ in CHIPS
        for cores in bins
    }
    simulations = {(o.device.architecture, o.device.family, o.device.cores) for o in apples()}
    assert simulations == known


# --- gates on 7 to 80 cores --------------------------------------------------------------------

CORES = range(7, 81)
ROWS = (1, 4, 5, 8, 9, 16)  # heads that may be split untuned; both sides of each tile


def here(cores: int) -> Device:
    """The gates know a chip by its cores alone."""
    return simulated("Apple M4 Max", "applegpu_g16s", cores, 64)


def ask(bucket: Bucket, cores: int) -> tuple[Plan, str]:
    return gates.gate(bucket, here(cores), MetalBackend(name="metal"))


@pytest.mark.parametrize("name", NAMES)
def test_the_gates_know_a_chip_by_its_cores_alone(name: str) -> None:
    architecture, bins = next((a, bins) for n, a, bins, _ in CHIPS if n == name)
    bucket = bucket_of(32768, 1, 16, "bfloat16")
    for cores in bins:
        found = simulated(name, architecture, cores, 64)
        assert gates.gate(bucket, found, MetalBackend(name="metal")) == ask(bucket, cores)


@pytest.mark.parametrize("heads", ROWS)
def test_an_idle_gpu_is_filled_or_left_to_mlx(heads: int) -> None:
    """Whatever the count: a split of the right tile that keeps the cores busy, or a reason."""
    tile = MetalBackend().tiles(Shape(32768, 1, heads))[0]
    for cores in CORES:
        for batch in (1, 2, 4, 8):
            bucket = bucket_of(32768, batch, heads, "bfloat16")
            plan, reason = ask(bucket, cores)
            tasks = row_groups(heads, tile) * batch
            if plan == MLX:
                shut = "less than 85%" if tasks < cores else f"keeps all {cores} cores busy"
                assert shut in reason, (cores, batch)
                continue
            assert (plan.path, plan.tile) == ("split", tile)
            assert 2 <= plan.partitions == pieces(bucket.context, plan.partitions)
            assert plan.partitions <= MAX_PARTITIONS
            assert busy(bucket.context, plan.partitions, tasks, cores) >= gates.MIN_FILL
            assert f"one pass keeps {tasks} of {cores} cores busy" in reason


def test_one_sequence_is_split_on_all_but_the_largest_gpus() -> None:
    """Pieces long enough to be worth their merge fill two tasks a core up to 37 cores, and of 43 by
    the luck of the last wave; beyond, tuning must tell.
    """
    bucket = bucket_of(32768, 1, 16, "bfloat16")
    split = [cores for cores in CORES if ask(bucket, cores)[0] != MLX]
    assert split == [*range(7, 38), 43]


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_no_hole_at_any_core_count(heads: int, batch: int) -> None:
    """A longer context never falls back to mlx: no bands that open and shut with the count."""
    contexts = (1024, 24576, 32768, 49152, 65536, 131072, 196608, 1 << 20)
    for cores in CORES:
        plans = [ask(bucket_of(n, batch, heads, "bfloat16"), cores)[0] for n in contexts]
        paths = [plan.path for plan in plans]
        assert paths == sorted(paths), (cores, paths)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"context": 24576}, "context 24576 is below 32768"),
        ({"heads": 17}, "17 heads are more than the 16"),
        ({"heads": 128}, "128 heads are more than the 16"),
        ({"heads": 8, "q_len": 2}, "2 query tokens a sequence"),
        (
            {"batch": 128},
            "cores busy; to tune this shape: mla-tune --device metal "
            "--contexts 32768 --batches 128 --heads 16",
        ),
    ],
)
def test_what_is_not_split_untuned_has_a_reason(options: dict[str, int], reason: str) -> None:
    shape = {"context": 32768, "batch": 1, "heads": 16, **options}
    bucket = bucket_of(
        shape["context"], shape["batch"], shape["heads"], "bfloat16", q_len=shape.get("q_len", 1)
    )
    for cores in CORES:
        plan, got = ask(bucket, cores)
        assert plan == MLX
        assert reason in got


def test_a_refused_kernel_leaves_mlx_with_its_reason() -> None:
    bucket, m4 = bucket_of(32768, 1, 16, "bfloat16"), recorded("m4")
    missing = MetalBackend(name="metal", reason="this MLX has no metal_kernel")
    assert gates.gate(bucket, m4, missing) == (MLX, "this MLX has no metal_kernel")
    zeros = MetalBackend(name="metal", checked=(False, "r16t16 gave only zeros"))
    plan, reason = gates.gate(bucket, m4, zeros)
    assert (plan, reason) == (
        MLX,
        "the kernel's self-check failed here: r16t16 gave only zeros",
    )


# --- a virtual machine -------------------------------------------------------------------------


def test_a_virtual_mac_runs_mlx_untuned_and_says_why() -> None:
    policy = Policy(recorded("virtual"), backend=MetalBackend(name="metal"))
    decision = policy.decide(65536, 1, 16, "bfloat16")
    assert (decision.plan, decision.source) == (MLX, "gates")
    assert decision.reason.startswith("the device's core count is unknown; to tune this shape: ")


def test_a_virtual_mac_can_be_tuned() -> None:
    bucket = bucket_of(32768, 1, 16, "bfloat16")
    plans = candidates(bucket, recorded("virtual"), MetalBackend(name="metal"))
    assert plans[0] == MLX
    assert {plan.path for plan in plans} >= {"mlx", "mlx_rows", "single", "split"}
    assert len(set(plans)) == len(plans)
