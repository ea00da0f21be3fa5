"""Device identity from recorded answers of many machines, and from this one."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mla_tuner import device
from mla_tuner.device import Device, System
from mla_tuner.errors import DeviceError

ZEN3 = "fpu sse2 fma avx f16c avx2 bmi2 sha_ni"
ICELAKE = ZEN3 + " avx512f avx512dq avx512bw avx512vl avx512_vnni"


def linux(
    root: Path,
    files: Mapping[str, str] = {},
    *,
    cpus: int = 8,
    machine: str = "x86_64",
    flags: str = ZEN3,
    commands: Mapping[str, bytes] = {},
) -> System:
    """A recorded Linux machine: 16 GB, 8 CPUs and what `files` adds or replaces."""
    recorded = {
        "proc/meminfo": "MemTotal:       16384000 kB\nMemFree:        1000 kB\n",
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Test CPU @ 3 GHz\nflags\t\t: {flags}\n",
        "proc/self/cgroup": "0::/\n",
        **files,
    }
    for name, text in recorded.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System("linux", machine, root, lambda: cpus, answers(commands))


def answers(commands: Mapping[str, bytes]):
    def run(command: Sequence[str]) -> bytes:
        return commands.get(" ".join(command), b"")

    return run


def macos(commands: Mapping[str, bytes], machine: str = "arm64") -> System:
    return System("darwin", machine, Path("/nonexistent"), lambda: 10, answers(commands))


def cache(level: int, kind: str, size: str, index: int) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
    return {f"{folder}/level": f"{level}\n", f"{folder}/type": kind, f"{folder}/size": size}


def test_key_names_every_part_of_the_identity():
    known = Device("cpu", "x86_64-avx512", "x86_64-avx512", 2, 24, "any", 1)
    assert known.key == "cpu/x86_64-avx512/2c/24gb"
    unknown = Device("metal", "applegpu_g17s", "apple-m5", None, 64, "any", 1)
    assert unknown.key == "metal/applegpu_g17s/?c/64gb"


def test_this_machine():
    here = device.probe("cpu")
    assert here.backend == "cpu"
    assert here.cores is not None
    assert here.cores >= 1
    assert here.memory_gb >= 1
    assert 0 < here.cache_bytes <= device.MAX_CACHE_BYTES
    assert here == device.probe("cpu")


def test_thread_setting_is_no_part_of_the_identity(monkeypatch):
    key = device.probe("cpu").key
    monkeypatch.setenv("MLA_TUNER_THREADS", "1")
    assert device.probe("cpu").key == key


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", ICELAKE, "x86_64-avx512"),
        ("AMD64", ICELAKE, "x86_64-avx512"),
        ("x86_64", ICELAKE + " amx_bf16 amx_tile amx_int8", "x86_64-amx"),
        ("x86_64", ICELAKE + " amx_tile amx_int8", "x86_64-avx512"),
        ("x86_64", ZEN3 + " amx_bf16 amx_tile", "x86_64-avx2"),  # AVX-512 switched off
        ("x86_64", ZEN3, "x86_64-avx2"),
        (
            "x86_64",
            ZEN3 + " avx512f avx512cd avx512er",
            "x86_64-avx2",
        ),  # Knights Landing: no bw, vl
        ("x86_64", ICELAKE.replace("avx512dq ", ""), "x86_64-avx2"),
        ("x86_64", "fpu sse2 avx avx2", "x86_64-sse2"),  # a hypervisor that hides fma
        ("x86_64", "", "x86_64-sse2"),
        ("aarch64", "", "aarch64-neon"),
        ("arm64", "", "aarch64-neon"),
        ("riscv64", "", "riscv64-generic"),
    ],
)
def test_architecture(tmp_path, machine, flags, expected):
    found = device.cpu_device(linux(tmp_path, machine=machine, flags=flags))
    assert (found.architecture, found.family) == (expected, expected)


def test_linux_name_and_memory(tmp_path):
    found = device.cpu_device(linux(tmp_path))
    assert (found.name, found.memory_gb, found.cores) == ("Test CPU @ 3 GHz", 16, 8)


def test_arm_has_no_model_name(tmp_path):
    system = linux(tmp_path, {"proc/cpuinfo": "processor : 0\n"}, machine="aarch64")
    assert device.cpu_device(system).name == "aarch64-neon"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),  # a quota above the affinity
        ({"sys/fs/cgroup/cpu.max": ""}, 8),
        ({"sys/fs/cgroup/cpu.max": "nonsense here\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "200000 0\n"}, 8),
        # v2, limit on an ancestor of this process's group
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
            },
            3,
        ),
        # v1 in a container: the path is the host's and not visible
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "garbage\n::\n\n"}, 8),
    ],
)
def test_cores_follow_the_quota(tmp_path, files, cores):
    assert device.usable_cores(linux(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "memory_gb"),
    [
        ({"sys/fs/cgroup/memory.max": "max\n"}, 16),
        ({"sys/fs/cgroup/memory.max": f"{4 << 30}\n"}, 4),
        ({"sys/fs/cgroup/memory.max": f"{64 << 30}\n"}, 16),
        ({"sys/fs/cgroup/memory.max": f"{100 << 20}\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 << 30}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8,
        ),
        ({"proc/meminfo": ""}, 1),
    ],
)
def test_memory_follows_the_limit(tmp_path, files, memory_gb):
    assert device.cpu_device(linux(tmp_path, files)).memory_gb == memory_gb


def test_cache_is_the_last_level(tmp_path):
    files = {
        **cache(1, "Data", "32K", 0),
        **cache(1, "Instruction", "64K", 1),
        **cache(2, "Unified", "512K", 2),
        **cache(3, "Unified", "32768K", 3),
    }
    assert device.last_level_cache(linux(tmp_path, files)) == (32 << 20, "sysfs")


def test_cache_from_getconf_where_sysfs_is_empty(tmp_path):
    system = linux(
        tmp_path,
        commands={"getconf LEVEL4_CACHE_SIZE": b"\n", "getconf LEVEL3_CACHE_SIZE": b"16777216\n"},
    )
    assert device.last_level_cache(system) == (16 << 20, "getconf")


def test_unknown_cache_is_assumed_and_said(tmp_path):
    size, reason = device.last_level_cache(linux(tmp_path))
    assert size == device.DEFAULT_CACHE_BYTES
    assert reason == "unknown; 32 MB assumed"


def test_bogus_cache_is_clipped_and_said(tmp_path):
    system = linux(tmp_path, cache(3, "Unified", "4194304K", 0))
    size, reason = device.last_level_cache(system)
    assert size == device.MAX_CACHE_BYTES
    assert reason == "sysfs says 4096 MB, not believed; 1024 MB assumed"


def test_nothing_readable_still_gives_a_device(tmp_path):
    system = System("linux", "x86_64", tmp_path / "nowhere", lambda: 3, answers({}))
    assert device.cpu_device(system).key == "cpu/x86_64-sse2/3c/1gb"


def test_macos_cpus():
    arm = macos(
        {
            "sysctl -n hw.memsize": b"38654705664\n",
            "sysctl -n hw.l2cachesize": b"4194304\n",
            "sysctl -n machdep.cpu.brand_string": b"Apple M4 Max\n",
        }
    )
    assert device.cpu_device(arm) == Device(
        "cpu", "aarch64-neon", "aarch64-neon", 10, 36, "Apple M4 Max", 4 << 20
    )
    intel = macos(
        {
            "sysctl -n hw.memsize": b"17179869184\n",
            "sysctl -n hw.l3cachesize": b"16777216\n",
            "sysctl -n machdep.cpu.features": b"FPU SSE2 FMA F16C\n",
            "sysctl -n machdep.cpu.leaf7_features": b"AVX2 BMI2\n",
        },
        machine="x86_64",
    )
    assert device.cpu_device(intel).key == "cpu/x86_64-avx2/10c/16gb"


IOREG = ["ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator"]
M5 = {"device_name": "Apple M5 Max", "architecture": "applegpu_g17s", "memory_size": 64 << 30}


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        (plistlib.dumps([{"gpu-core-count": 40}]), "metal/applegpu_g17s/40c/64gb"),
        (plistlib.dumps([{"IOClass": "AGXAcceleratorG17S"}]), "metal/applegpu_g17s/?c/64gb"),
        (plistlib.dumps([]), "metal/applegpu_g17s/?c/64gb"),
        (plistlib.dumps([{"gpu-core-count": 0}]), "metal/applegpu_g17s/?c/64gb"),
        (plistlib.dumps([{"gpu-core-count": "40"}]), "metal/applegpu_g17s/?c/64gb"),
        (b"<plist><array><dict>", "metal/applegpu_g17s/?c/64gb"),
        (b"", "metal/applegpu_g17s/?c/64gb"),  # no ioreg, or a virtual machine
    ],
)
def test_metal_cores_from_the_registry(answer, key):
    found = device.metal_device(M5, macos({" ".join(IOREG): answer}))
    assert (found.key, found.family, found.name) == (key, "apple-m5", "Apple M5 Max")


def test_metal_chip_with_a_strange_name():
    found = device.metal_device({"device_name": "Apple Paravirtual device"}, macos({}))
    assert (found.key, found.family) == ("metal/unknown/?c/1gb", "apple-unknown")


def test_cuda():
    info = {"device_name": "NVIDIA H200", "architecture": "sm_90", "total_memory": 140 << 30}
    found = device.cuda_device(info, {"cores": 132, "cache_bytes": 60 << 20})
    assert (found.key, found.family) == ("cuda/sm_90/132c/140gb", "nvidia-sm90")
    assert found.cache_bytes == 60 << 20
    assert device.cuda_device(info, {}).key == "cuda/sm_90/?c/140gb"


def test_free_memory_is_the_drivers_or_the_systems_word(monkeypatch, tmp_path):
    gpu = device.cuda_device({"device_name": "H", "total_memory": 8 << 30}, {})
    for info, free in (({"free_memory": 5 << 30}, 5), ({}, 8)):
        monkeypatch.setattr(device, "_gpu", lambda info=info: ("cuda", info))
        assert device.free_bytes(gpu) == free << 30
    system = linux(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 25165824 kB\nMemAvailable: 3145728 kB\n")
    cpu = device.cpu_device(system)
    assert (cpu.memory_gb, device.free_bytes(cpu, system)) == (24, 3 << 30)
    assert device.free_bytes(cpu, macos({})) == 24 << 30
    apple = device.metal_device(M5, macos({}))
    assert device.free_bytes(apple, system) == apple.memory_gb << 30


def test_absent_device_is_one_line_that_names_what_is_there(monkeypatch):
    monkeypatch.setattr(device, "_gpu", lambda: ("", {}))
    with pytest.raises(DeviceError, match=r"^no metal device here: MLX \S+ sees cpu only$"):
        device.probe("metal")
    monkeypatch.setattr(device, "_gpu", lambda: ("metal", M5))
    with pytest.raises(DeviceError, match=r"sees cpu and metal$"):
        device.probe("cuda")


def test_unknown_choice():
    with pytest.raises(DeviceError, match="expected device in auto, cpu, cuda, metal; got 'tpu'"):
        device.probe("tpu")


def test_auto_follows_the_default_device(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_gpu", lambda: ("metal", M5))

    class Default:
        type = mx.gpu

    monkeypatch.setattr(device.mx, "default_device", Default)
    assert device.probe("auto", macos({})).backend == "metal"
    Default.type = mx.cpu
    assert device.probe("auto", linux(tmp_path)).backend == "cpu"


def test_cuda_build_without_a_gpu_counts_as_cpu(monkeypatch):
    monkeypatch.setattr(device.mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(device.mx, "device_info", lambda _: {})
    assert device._gpu() == ("", {})


def test_use_sets_the_default_device(monkeypatch):
    chosen = []
    monkeypatch.setattr(device.mx, "set_default_device", chosen.append)
    device.use(device.probe("cpu"))
    device.use(device.metal_device(M5, macos({})))
    assert chosen == [mx.cpu, mx.gpu]


def test_software(tmp_path):
    files = {
        "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n",
    }
    found = device.software(linux(tmp_path, files))
    assert found["os"] == "Debian GNU/Linux 12 (bookworm)"
    assert found["driver"] == "570.86.15"
    assert found["mlx"] == device.MLX_VERSION
    mac = device.software(
        macos({"sw_vers -productVersion": b"26.5\n", "sw_vers -buildVersion": b"25F71\n"})
    )
    assert mac["os"] == mac["system"] == "macOS 26.5 (25F71)"
    assert "driver" not in mac


@pytest.mark.parametrize(
    ("release", "driver", "text"),
    [
        ('PRETTY_NAME="Debian 12"', "", "Debian 12"),
        ("PRETTY_NAME=Alpine", "Kernel Module  570.86.15", "Alpine, driver 570.86.15"),
        ('PRETTY_NAME="A\x1b[31m\tB\u2028"', "", "A[31mB"),  # it is stored as one line
        ("", "Kernel Module  570.86.15", ""),
        ('PRETTY_NAME=""', "", ""),
    ],
)
def test_system_version(tmp_path, release, driver, text):
    files = {"etc/os-release": release, "proc/driver/nvidia/version": driver}
    system = linux(tmp_path, files)
    assert device.system_version(system) == device.software(system)["system"] == text


def test_a_system_that_tells_nothing_is_unknown(tmp_path):
    assert device.system_version(linux(tmp_path, {})) == ""
    assert device.system_version(macos({"sw_vers -productVersion": b"26.5\n"})) == ""
    assert device.software(linux(tmp_path, {}))["os"] == "linux"


def test_missing_and_failing_commands_answer_nothing():
    assert device._command_output(["mla-tuner-no-such-command"]) == b""
    assert device._command_output([sys.executable, "-c", "print('hello')"]) == b"hello\n"
