"""The device that plans are measured for: its identity and its software."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import mlx.core as mx

from .errors import DeviceError

MLX_VERSION = str(vars(mx)["__version__"])  # missing in MLX's type stubs
CHOICES = ("auto", "cpu", "cuda", "metal")
GB = 1 << 30
# A larger last-level cache than this is a virtual machine's invention; rotating three times its
# size would fill the memory.
MAX_CACHE_BYTES = GB
DEFAULT_CACHE_BYTES = 32 << 20
# No Apple chip tells the size of its system-level cache; this is the largest one known (Ultra).
APPLE_CACHE_BYTES = 96 << 20

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# What the kernels of csrc/ are compiled with, widest first.
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_X86_LEVELS = (
    ("amx", {"amx_tile", "amx_bf16"} | _AVX512),
    ("avx512", _AVX512),
    ("avx2", {"avx2", "fma", "f16c"}),
)


@dataclass(frozen=True)
class Device:
    """Identity of one device. `cores` are those this process may use; None where unknown.

    `memory_gb` counts GiB, rounded. `cache_bytes` is the last-level cache: measuring rotates over
    several times as much data. `name` is for people and is no part of the identity.
    """

    backend: str
    architecture: str
    family: str
    cores: int | None
    memory_gb: int
    name: str
    cache_bytes: int

    @property
    def key(self) -> str:
        """Text that plans are stored under, e.g. `cpu/x86_64-avx512/2c/24gb`."""
        cores = "?" if self.cores is None else self.cores
        return f"{self.backend}/{self.architecture}/{cores}c/{self.memory_gb}gb"


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _command_output(command: Sequence[str]) -> bytes:
    # Servers are started with any PATH, and must find the same device: macOS keeps sysctl and ioreg
    # in /usr/sbin.
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
    try:
        return subprocess.run(
            command, capture_output=True, timeout=5, check=False, env={**os.environ, "PATH": path}
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


@dataclass(frozen=True)
class System:
    """Where facts about this machine are read; tests put recorded answers in its place."""

    os_name: str = sys.platform
    machine: str = platform.machine()
    root: Path = Path("/")
    usable_cpus: Callable[[], int] = _usable_cpus
    command: Callable[[Sequence[str]], bytes] = _command_output

    def read(self, path: str | PurePosixPath) -> str:
        """Text of a file below `root`, stripped; empty when it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def sysctl(self, name: str) -> str:
        """One kernel value of macOS; empty when there is none of that name."""
        return self.command(["sysctl", "-n", name]).decode(errors="replace").strip()

    @property
    def macos(self) -> bool:
        """True on macOS."""
        return self.os_name == "darwin"


SYSTEM = System()


def probe(choice: str = "auto", system: System = SYSTEM) -> Device:
    """The device named by `choice`: `auto`, `cpu`, `cuda` or `metal`.

    `auto` is the type of MLX's default device. Raises DeviceError when the named one is not there.
    """
    if choice not in CHOICES:
        raise DeviceError(f"expected device in {', '.join(CHOICES)}; got {choice!r}")
    gpu, info = _gpu()
    if choice == "auto":
        choice = gpu if gpu and mx.default_device().type == mx.gpu else "cpu"
    if choice == "cpu":
        return cpu_device(system)
    if choice != gpu:
        there = f"cpu and {gpu}" if gpu else "cpu only"
        raise DeviceError(f"no {choice} device here: MLX {MLX_VERSION} sees {there}")
    return metal_device(info, system) if gpu == "metal" else cuda_device(info, _cuda_attributes())


def free_bytes(device: Device, system: System = SYSTEM) -> int:
    """Memory that nobody uses right now; all of it where the system doesn't tell."""
    whole = device.memory_gb * GB
    if device.backend == "cuda":
        free = _gpu()[1].get("free_memory")
        return free if isinstance(free, int) else whole
    if device.backend == "cpu":
        match = re.search(r"^MemAvailable:\s*(\d+) kB", system.read("proc/meminfo"), re.MULTILINE)
        return min(whole, int(match[1]) * 1024) if match else whole
    return whole


def use(device: Device) -> None:
    """Make MLX run on this device from now on."""
    mx.set_default_device(mx.cpu if device.backend == "cpu" else mx.gpu)


def _gpu() -> tuple[str, Mapping[str, object]]:
    """Kind of MLX's GPU (empty when there is none) and what MLX tells about it."""
    kind = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else ""
    if not kind:
        return "", {}
    # MLX's CUDA build answers "available" on machines without a GPU, and then knows no name.
    info = mx.device_info(mx.gpu)
    return (kind, info) if info.get("device_name") else ("", {})


# --- CPU ---------------------------------------------------------------------------------------


def cpu_device(system: System = SYSTEM) -> Device:
    """This machine's CPU, as far as this process may use it."""
    architecture = _cpu_architecture(system)
    return Device(
        backend="cpu",
        architecture=architecture,
        family=architecture,
        cores=usable_cores(system),
        memory_gb=max(1, round(_memory_bytes(system) / GB)),
        name=_cpu_name(system) or architecture,
        cache_bytes=last_level_cache(system)[0],
    )


def usable_cores(system: System = SYSTEM) -> int:
    """Cores that affinity and cgroup quotas leave to this process, at least 1.

    A quota of 1.5 cores counts as 1: a second thread would be stopped in the middle of a kernel.
    """
    quota = min((_quota(system, folder) for folder in _cgroups(system, "cpu")), default=math.inf)
    cores = system.usable_cpus()
    return max(1, cores if quota >= cores else int(quota))


def last_level_cache(system: System = SYSTEM) -> tuple[int, str]:
    """Bytes of the CPU's last-level cache, and where the number comes from."""
    if system.macos:
        sizes = [_number(system.sysctl(f"hw.{name}")) for name in ("l3cachesize", "l2cachesize")]
        size, source = next((size for size in sizes if size), 0), "sysctl"
    else:
        size, source = _sysfs_cache(system), "sysfs"
        if not size:
            names = [f"LEVEL{level}_CACHE_SIZE" for level in (4, 3, 2)]
            sizes = [_number(system.command(["getconf", name]).decode()) for name in names]
            size, source = next((size for size in sizes if size), 0), "getconf"
    if not size:
        return DEFAULT_CACHE_BYTES, f"unknown; {DEFAULT_CACHE_BYTES >> 20} MB assumed"
    if size > MAX_CACHE_BYTES:
        return MAX_CACHE_BYTES, f"{source} says {size >> 20} MB, not believed; 1024 MB assumed"
    return size, source


def _cpu_architecture(system: System) -> str:
    machine = _MACHINES.get(system.machine.lower(), system.machine.lower())
    if machine == "aarch64":
        return "aarch64-neon"
    if machine != "x86_64":
        return f"{machine}-generic"
    flags = _cpu_flags(system)
    level = next((name for name, needed in _X86_LEVELS if needed <= flags), "sse2")
    return f"{machine}-{level}"


def _cpu_flags(system: System) -> set[str]:
    if system.macos:
        names = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
        return set(" ".join(system.sysctl(name) for name in names).lower().split())
    return set(_cpuinfo(system, "flags").lower().split())


def _cpu_name(system: System) -> str:
    if system.macos:
        return system.sysctl("machdep.cpu.brand_string")
    return _cpuinfo(system, "model name")


def _cpuinfo(system: System, field: str) -> str:
    match = re.search(rf"^{field}\s*:(.*)$", system.read("proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else ""


def _memory_bytes(system: System) -> int:
    """Physical memory, or less where a cgroup limits this process."""
    if system.macos:
        return _number(system.sysctl("hw.memsize"))
    match = re.search(r"^MemTotal:\s*(\d+) kB", system.read("proc/meminfo"), re.MULTILINE)
    limits = [int(match[1]) * 1024] if match else []
    for folder in _cgroups(system, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, v1
            limits.append(_number(system.read(folder / name)))
    return min((limit for limit in limits if limit), default=0)


def _cgroups(system: System, controller: str) -> Iterator[PurePosixPath]:
    """Folders whose limits bind this process, innermost first, for cgroup v2 and v1.

    In a container the path may name folders of the host that are not visible: those read empty,
    and the mounted root, which comes last, holds the container's own limit.
    """
    for line in system.read("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = PurePosixPath("sys/fs/cgroup", controller if controllers else "")
        folder = PurePosixPath(path.lstrip("/"))
        for part in (folder, *folder.parents):
            yield base / part


def _quota(system: System, folder: PurePosixPath) -> float:
    """Cores that one cgroup folder allows; infinite without a limit."""
    quota, _, period = system.read(folder / "cpu.max").partition(" ")  # cgroup v2
    if not period:
        quota = system.read(folder / "cpu.cfs_quota_us")  # v1, -1 for no limit
        period = system.read(folder / "cpu.cfs_period_us")
    limit, length = _number(quota), _number(period)
    return limit / length if limit and length else math.inf


def _sysfs_cache(system: System) -> int:
    sizes = {}
    for index in range(8):
        folder = PurePosixPath(f"sys/devices/system/cpu/cpu0/cache/index{index}")
        if system.read(folder / "type") in ("Data", "Unified"):
            level = _number(system.read(folder / "level"))
            sizes[level] = _number(system.read(folder / "size"))
    return sizes[max(sizes)] if sizes else 0


def _number(text: str) -> int:
    """A positive number with an optional K or M; 0 for anything else ("max", "-1", nothing)."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip())
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]] if match else 0


# --- GPU ---------------------------------------------------------------------------------------


def metal_device(info: Mapping[str, object], system: System = SYSTEM) -> Device:
    """An Apple GPU, from MLX's device info and the I/O registry.

    Its family is the chip's generation; a device that isn't named after a chip, as in virtual
    machines, is a family of its own architecture.
    """
    name = str(info["device_name"])
    architecture = str(info.get("architecture") or "unknown")
    chip = re.search(r"\b[AM]\d+\b", name)
    return Device(
        backend="metal",
        architecture=architecture,
        family=f"apple-{chip[0].lower()}" if chip else f"apple-{architecture}",
        cores=_metal_cores(system),
        memory_gb=_info_gb(info),
        name=name,
        cache_bytes=APPLE_CACHE_BYTES,
    )


def _metal_cores(system: System) -> int | None:
    """GPU cores; None where the registry tells none, as in virtual machines, or contradicts itself.

    A guess would be worse: it would select the plans of another device.
    """
    import plistlib

    answer = system.command(["ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator"])
    try:
        counts = set(_core_counts(plistlib.loads(answer)))
    except Exception:  # plistlib raises whatever its parsers do
        return None
    return counts.pop() if len(counts) == 1 else None


def _core_counts(entry: object) -> Iterator[int]:
    """Every believable count in registry entries, which may hold others."""
    if isinstance(entry, dict):
        count = entry.get("gpu-core-count")
        if isinstance(count, bytes):  # as the device tree writes numbers
            count = int.from_bytes(count, "little")
        if type(count) is int and 0 < count < 1024:  # True is an int, too
            yield count
        yield from _core_counts(list(entry.values()))
    elif isinstance(entry, list):
        for each in entry:
            yield from _core_counts(each)


def cuda_device(info: Mapping[str, object], attributes: Mapping[str, int]) -> Device:
    """An NVIDIA GPU, from MLX's device info and the driver's `cores` and `cache_bytes`."""
    architecture = str(info.get("architecture") or "unknown")
    return Device(
        backend="cuda",
        architecture=architecture,
        family="nvidia-" + architecture.replace("_", ""),
        cores=attributes.get("cores"),
        memory_gb=_info_gb(info),
        name=str(info["device_name"]),
        cache_bytes=attributes.get("cache_bytes", DEFAULT_CACHE_BYTES),
    )


def _cuda_attributes() -> dict[str, int]:
    """Multiprocessors and L2 bytes of the first visible GPU; empty where the driver won't tell."""
    import ctypes

    numbers = {
        "cores": 16,
        "cache_bytes": 38,
    }  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _L2_CACHE_SIZE
    device, value, found = ctypes.c_int(), ctypes.c_int(), {}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return {}
        for name, number in numbers.items():
            failed = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
            if not failed and value.value > 0:
                found[name] = value.value
    except (OSError, AttributeError):
        return {}
    return found


def _info_gb(info: Mapping[str, object]) -> int:
    size = info.get("memory_size") or info.get("total_memory") or 0  # Metal, CUDA
    return max(1, round(size / GB)) if isinstance(size, int) else 1


# --- software ------------------------------------------------------------------------------------


def software(system: System = SYSTEM) -> dict[str, str]:
    """Versions that a measurement depends on.

    Keys: mla_tuner, mlx, python, os, kernel, system (see `system_version`), and driver where known.
    """
    from . import __version__

    versions = {"mla_tuner": __version__, "mlx": MLX_VERSION, "python": platform.python_version()}
    versions |= {"os": _os_version(system) or system.os_name, "kernel": platform.release()}
    versions["system"] = system_version(system)
    driver = _driver_version(system)
    return {**versions, "driver": driver} if driver else versions


def system_version(system: System = SYSTEM) -> str:
    """Release of the OS and of the GPU's driver, as one text; "" where the OS doesn't tell.

    Winners measured under another one don't count until they were verified. The kernel's release
    is no part of it: distributions change that every few weeks, and it holds no maths.
    """
    release, driver = _os_version(system), _driver_version(system)
    text = f"{release}, driver {driver}" if release and driver else release
    return "".join(each for each in text if each.isprintable())


def _os_version(system: System) -> str:
    if not system.macos:
        release = system.read("etc/os-release")
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
        return match[1].strip() if match else ""
    product, build = (
        system.command(["sw_vers", f"-{part}"]).decode(errors="replace").strip()
        for part in ("productVersion", "buildVersion")
    )
    # The Metal compiler ships with the system: the build counts, not only the version.
    return f"macOS {product} ({build})" if product and build else ""


def _driver_version(system: System) -> str:
    """Of NVIDIA's kernel module; elsewhere drivers come with the OS."""
    text = system.read("proc/driver/nvidia/version")
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    return match[1] if match else ""
