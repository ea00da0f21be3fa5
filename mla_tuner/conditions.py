"""The state this machine is in: what of it moves timings, and when timing is worthless."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping

from .device import SYSTEM, Device, System
from .errors import BusyError
from .words import counted

# Others may take so much of the cores that are timed. With half of each, even a kernel on one core
# meets others in half of its samples, and no median is that of a quiet machine.
MAX_OTHERS = 0.5
# Intel Macs count down from 100 when they throttle for heat. A few percent are within the noise.
MIN_SPEED_PERCENT = 90
WINDOW_S = 0.5  # 50 ticks a core: 2 % steps
PATIENCE_S = 10.0  # the end of a build, an indexer, an app that starts: they pass in seconds
# Under these drivers the governor `powersave` still raises clocks under load.
_DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp")


def settle(
    device: Device,
    *,
    force: bool = False,
    patience_s: float = PATIENCE_S,
    system: System = SYSTEM,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[str], None] = lambda reason: None,
) -> dict[str, object]:
    """Waits until the machine is fit for timing; the state it is in then, for the record.

    As `conditions`, with `others_cores` (what other processes take), `waited_s`, and `forced` with
    the reason that would have refused. `tell` is given the reason for waiting, once. What can't be
    read is no reason. With `force` there is no wait.

    Raises:
        BusyError: it was not fit within `patience_s`, and is not forced.
    """
    waited = 0.0
    while True:
        before = _throttled(system)
        others = others_cores(system, sleep)
        found = conditions(system)
        if others is not None:
            found["others_cores"] = round(others, 2)
        if _throttled(system) > before:
            found["throttled"] = True
        reason = objection(found, device, system.usable_cpus())
        if reason and not force and waited + 2 * WINDOW_S <= patience_s:
            if not waited:
                tell(f"waiting up to {patience_s:.0f} s: {reason}")
            sleep(WINDOW_S)
            waited += 2 * WINDOW_S
            continue
        if waited:
            found["waited_s"] = waited
        if reason and not force:
            raise BusyError(f"{reason}: timings would be worthless. Mend that, or use --force")
        return {**found, "forced": reason} if reason else found


def clock(device: Device, queued: bool) -> dict[str, object]:
    """By which clock a run times, for the record: of a GPU that has one it is no matter of course.

    queued: whether samples are GPU time, see `Runner.queued`.
    """
    return {"clock": "gpu" if queued else "wall"} if device.backend == "cuda" else {}


def objection(found: Mapping[str, object], device: Device, cpus: int) -> str | None:
    """Why times taken under these conditions are not those of this device; None if they are.

    cpus: those that `others_cores` is about. Running on battery is no objection: where it slows the
    machine down, one of the other signs shows it.
    """
    needed = (device.cores or cpus) if device.backend == "cpu" else 1  # a GPU needs one, to launch
    others = found.get("others_cores", 0.0)
    speed = found.get("speed_limit_percent", 100)
    assert isinstance(others, float)
    assert isinstance(speed, int)
    if others - (cpus - needed) > MAX_OTHERS * needed:  # the cores that are not needed are free
        return f"other processes use {others:.1f} of {counted(cpus, 'core')}"
    if found.get("low_power_mode") or found.get("platform_profile") == "low-power":
        return "low-power mode is on"
    driver = found.get("driver", "")  # unknown is not slow
    if found.get("governor") == "powersave" and driver not in ("", *_DYNAMIC_DRIVERS):
        return "the CPU governor powersave holds the lowest clock"
    if speed < MIN_SPEED_PERCENT:
        return f"heat limits the CPU to {speed} % of its speed"
    return "the CPU throttles for heat" if found.get("throttled") else None


# --- what others do ----------------------------------------------------------------------------


def others_cores(
    system: System = SYSTEM, sleep: Callable[[float], None] = time.sleep
) -> float | None:
    """Cores that other processes take of those this one may use, in a window; None if unknown.

    No load average: that remembers a build for minutes after its end.
    """
    if system.macos:
        return _macos_others(system)
    before, own = _ticks(system), sum(os.times()[:4])
    sleep(WINDOW_S)
    after, own = _ticks(system), sum(os.times()[:4]) - own
    cpus = len(before.keys() & after.keys())
    busy, total = (
        sum(after[cpu][i] - before[cpu][i] for cpu in before.keys() & after.keys()) for i in (0, 1)
    )
    if total <= 0:
        return None
    share = cpus * busy / total
    return max(0.0, share - own / WINDOW_S)


def _ticks(system: System) -> dict[str, tuple[int, int]]:
    """Busy and all ticks of each CPU that this process may use."""
    found = {}
    allowed = _allowed_cpus(system)
    for line in system.read("proc/stat").splitlines():
        match = re.fullmatch(r"cpu(\d+)((?: +\d+){8})[ \d]*", line)
        if match and (not allowed or int(match[1]) in allowed):
            # Without what a hypervisor steals: nobody here can stop it, and the canary sees it.
            user, nice, kernel, idle, waiting, *interrupts, _ = map(int, match[2].split())
            busy = user + nice + kernel + sum(interrupts)
            found[match[1]] = (busy, busy + idle + waiting)
    return found


def _allowed_cpus(system: System) -> set[int]:
    """Numbers from `0-3,8`; empty where unknown."""
    text = re.search(r"^Cpus_allowed_list:\s*(\S+)", system.read("proc/self/status"), re.MULTILINE)
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text[1] if text else ""):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _macos_others(system: System) -> float | None:
    """From the second of two samples of `top`, a second apart; the first is since boot."""
    output = system.command(["top", "-l", "2", "-n", "0", "-s", "1"]).decode(errors="replace")
    idle = re.findall(r"CPU usage:.*?([\d.]+)% idle", output)
    if len(idle) < 2:
        return None
    return max(0.0, 1 - float(idle[-1]) / 100) * system.usable_cpus()


def _throttled(system: System) -> int:
    """How often CPUs were throttled for heat since boot; 0 where nobody counts."""
    counts = system.root.glob("sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count")
    texts = [system.read(path.relative_to(system.root).as_posix()) for path in counts]
    return sum(int(text) for text in texts if text.isdecimal())


# --- the state ---------------------------------------------------------------------------------


def conditions(system: System = SYSTEM) -> dict[str, object]:
    """State of the machine that moves timings, as far as it can be read; never raises.

    Keys, each only where known: `load_1m`, `power` (mains or battery), `temperature_c`, `governor`
    and its `driver`, `platform_profile`, `speed_limit_percent`, `low_power_mode`.
    """
    found: dict[str, object] = {}
    try:
        found["load_1m"] = round(os.getloadavg()[0], 2)
        found.update(_macos_conditions(system) if system.macos else _linux_conditions(system))
    except Exception as error:  # whatever a strange machine answers, tuning goes on
        found["unreadable"] = str(error)
    return found


def _linux_conditions(system: System) -> dict[str, object]:
    found: dict[str, object] = {}
    for folder in sorted(system.root.glob("sys/class/power_supply/*")):
        supply = folder.relative_to(system.root).as_posix()
        if system.read(f"{supply}/type") == "Mains":
            found["power"] = "mains" if system.read(f"{supply}/online") == "1" else "battery"
    heat = max(_heats(system), default=0)
    if heat:
        found["temperature_c"] = heat / 1000
    frequency = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {
        "governor": f"{frequency}/scaling_governor",
        "driver": f"{frequency}/scaling_driver",
        "platform_profile": "sys/firmware/acpi/platform_profile",
    }
    texts = {name: system.read(path) for name, path in files.items()}
    return found | {name: text for name, text in texts.items() if text}


def _heats(system: System) -> Iterator[int]:
    """Thousandths of a degree, one a thermal zone."""
    for zone in system.root.glob("sys/class/thermal/thermal_zone*/temp"):
        text = system.read(zone.relative_to(system.root).as_posix())
        yield int(text) if text.isdecimal() else 0


def _macos_conditions(system: System) -> dict[str, object]:
    found: dict[str, object] = {}
    battery = system.command(["pmset", "-g", "batt"]).decode(errors="replace")
    source = re.search(r"Now drawing from '(AC|Battery)", battery)
    if source:
        found["power"] = "mains" if source[1] == "AC" else "battery"
    thermal = system.command(["pmset", "-g", "therm"]).decode(errors="replace")
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", thermal)
    if limit:
        found["speed_limit_percent"] = int(limit[1])
    mode = re.search(
        r"lowpowermode\s+(\d)", system.command(["pmset", "-g"]).decode(errors="replace")
    )
    if mode:
        found["low_power_mode"] = mode[1] == "1"
    return found
