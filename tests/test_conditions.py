"""Which states of a machine are recorded, waited for and refused, from recorded answers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fakes import make_device

from mla_tuner import conditions
from mla_tuner.conditions import PATIENCE_S, WINDOW_S, objection, others_cores, settle
from mla_tuner.device import System
from mla_tuner.errors import BusyError

CPU, GPU = make_device(4), make_device(80, "cuda")
HZ = 100
FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"


def linux(root: Path, files: Mapping[str, str] = {}) -> System:
    write(root, files)
    return System("linux", "x86_64", root, lambda: 4, lambda command: b"")


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def macos(answers: Mapping[str, bytes]) -> System:
    def run(command: Sequence[str]) -> bytes:
        return answers.get(" ".join(command), b"")

    return System("darwin", "arm64", Path("/nonexistent"), lambda: 10, run)


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # a function, see `make`
    """Four CPUs whose time goes by in `sleep`; each window others take the next of some cores."""

    def make(
        *cores: float, own: float = 0.0, cpus: str = "0-3"
    ) -> tuple[System, Callable[[float], None], list[float]]:
        loads: Iterator[float] = iter(cores)
        spent = {"own": 0.0, "busy": 0.0, "all": 0.0}
        sleeps: list[float] = []

        def stat() -> None:
            each, idle = spent["busy"] / 4, (spent["all"] - spent["busy"]) / 4
            stolen = spent["all"]  # by other virtual machines: not by processes of this one
            fields = [each / 2, 0, each / 4, idle / 2, idle / 2, 0, each / 4, stolen, 0, 0]
            numbers = " ".join(str(round(value * HZ)) for value in fields)
            lines = [f"cpu  {numbers}", *(f"cpu{i} {numbers}" for i in range(8)), "intr 1 2 3"]
            write(tmp_path, {"proc/stat": "\n".join(lines)})

        def sleep(seconds: float) -> None:
            sleeps.append(seconds)
            load = next(loads, cores[-1])
            spent["own"] += own * seconds
            spent["busy"] += (load + own) * seconds
            spent["all"] += 4 * seconds
            stat()

        stat()
        write(tmp_path, {"proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{cpus}\n"})
        times = lambda: os.times_result((spent["own"], 0.0, 0.0, 0.0, 0.0))  # noqa: E731
        monkeypatch.setattr("mla_tuner.conditions.os.times", times)
        return linux(tmp_path), sleep, sleeps

    return make


# --- what others do ----------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "own"), [(0.0, 0.0), (1.2, 0.0), (0.4, 2.0), (4.0, 0.0)])
def test_others_are_told_from_this_process(busy, load: float, own: float) -> None:
    system, sleep, sleeps = busy(load, own=own)
    assert others_cores(system, sleep) == pytest.approx(load, abs=0.15)
    assert sleeps == [WINDOW_S]


def test_only_the_cpus_that_this_process_may_use_count(busy) -> None:
    system, sleep, _ = busy(2.0, cpus="1,3")
    assert others_cores(system, sleep) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("stat", ["", "cpu0 1 2 3", "cpu0 0 0 0 0 0 0 0 0", "nonsense\n"])
def test_what_cannot_be_read_is_unknown_and_not_busy(tmp_path: Path, stat: str) -> None:
    system = linux(tmp_path, {"proc/stat": stat})
    assert others_cores(system, lambda seconds: None) is None
    assert "others_cores" not in settle(CPU, system=system, sleep=lambda seconds: None)


def test_a_mac_is_asked_by_top() -> None:
    line = "CPU usage: 30.0% user, 20.0% sys, {}% idle\n"
    answer = (line.format("3.00") + line.format("75.5")).encode()
    assert others_cores(macos({"top -l 2 -n 0 -s 1": answer})) == pytest.approx(2.45)
    assert others_cores(macos({"top -l 2 -n 0 -s 1": line.format("3.00").encode()})) is None
    assert others_cores(macos({})) is None


def test_this_machine_can_be_asked() -> None:
    found = others_cores(sleep=lambda seconds: None)
    assert found is None or found >= 0


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "device", "cpus", "reason"),
    [
        ({}, CPU, 4, None),
        ({"load_1m": 90.0, "power": "battery", "temperature_c": 99.0}, CPU, 4, None),
        ({"others_cores": 1.9}, CPU, 4, None),
        ({"others_cores": 2.1}, CPU, 4, "other processes use 2.1 of 4 cores"),
        ({"others_cores": 60.0}, CPU, 128, None),  # a quota on a large machine: cores are left
        ({"others_cores": 127.0}, CPU, 128, "other processes use 127.0 of 128 cores"),
        ({"others_cores": 3.0}, GPU, 4, None),
        ({"others_cores": 3.8}, GPU, 4, "other processes use 3.8 of 4 cores"),
        ({"low_power_mode": True}, GPU, 4, "low-power mode is on"),
        ({"low_power_mode": False}, GPU, 4, None),
        ({"platform_profile": "low-power"}, CPU, 4, "low-power mode is on"),
        ({"governor": "powersave", "driver": "intel_pstate"}, CPU, 4, None),
        ({"governor": "powersave", "driver": "acpi-cpufreq"}, CPU, 4, "the CPU governor powersave"),
        ({"governor": "powersave"}, CPU, 4, None),  # unknown is not slow
        ({"speed_limit_percent": 100}, CPU, 4, None),
        ({"speed_limit_percent": 80}, CPU, 4, "heat limits the CPU to 80 % of its speed"),
        ({"throttled": True}, CPU, 4, "the CPU throttles for heat"),
    ],
)
def test_objections(found, device, cpus, reason) -> None:
    got = objection(found, device, cpus)
    assert got is None if reason is None else got.startswith(reason)


def test_a_quiet_machine_is_measured_at_once(busy) -> None:
    system, sleep, sleeps = busy(0.1)
    told: list[str] = []
    found = settle(CPU, system=system, sleep=sleep, tell=told.append)
    assert found["others_cores"] == pytest.approx(0.1, abs=0.05)
    assert not {"waited_s", "forced"} & found.keys()
    assert (told, sleeps) == ([], [WINDOW_S])


def test_the_end_of_a_build_is_waited_for(busy) -> None:
    system, sleep, _ = busy(4.0, 4.0, 4.0, 4.0, 0.1)
    told: list[str] = []
    found = settle(CPU, system=system, sleep=sleep, tell=told.append)
    assert found["waited_s"] == 2.0
    assert "forced" not in found
    assert told == ["waiting up to 10 s: other processes use 4.0 of 4 cores"]


def test_a_busy_machine_is_refused_in_one_line(busy) -> None:
    system, sleep, sleeps = busy(3.0)
    with pytest.raises(BusyError) as refusal:
        settle(CPU, system=system, sleep=sleep)
    assert str(refusal.value) == (
        "other processes use 3.0 of 4 cores: timings would be worthless. Mend that, or use --force"
    )
    assert PATIENCE_S <= sum(sleeps) <= PATIENCE_S + 2 * WINDOW_S


@pytest.mark.parametrize(("patience_s", "waited_s"), [(0.1, 0.0), (1.5, 1.0), (3.0, 3.0)])
def test_who_has_less_time_waits_no_longer(busy, patience_s: float, waited_s: float) -> None:
    system, sleep, sleeps = busy(3.0)
    with pytest.raises(BusyError):
        settle(CPU, patience_s=patience_s, system=system, sleep=sleep)
    assert sum(sleeps) == waited_s + WINDOW_S


def test_force_goes_on_at_once_and_is_recorded(busy) -> None:
    system, sleep, sleeps = busy(3.0)
    found = settle(CPU, force=True, system=system, sleep=sleep)
    assert found["forced"] == "other processes use 3.0 of 4 cores"
    assert sleeps == [WINDOW_S]


def test_throttling_counts_while_it_happens(tmp_path: Path) -> None:
    counter = "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count"
    system = linux(tmp_path, {counter: "41"})
    assert "throttled" not in settle(CPU, system=system, sleep=lambda seconds: None)

    def hot(seconds: float) -> None:
        write(tmp_path, {counter: str(int((tmp_path / counter).read_text()) + 1)})

    found = settle(CPU, force=True, system=system, sleep=hot)
    assert found["forced"] == "the CPU throttles for heat"


# --- what is recorded --------------------------------------------------------------------------


def test_conditions_of_a_laptop(tmp_path: Path) -> None:
    system = linux(
        tmp_path,
        {
            "sys/class/power_supply/AC/type": "Mains",
            "sys/class/power_supply/AC/online": "0",
            "sys/class/power_supply/BAT0/type": "Battery",
            "sys/class/thermal/thermal_zone0/temp": "41000",
            "sys/class/thermal/thermal_zone1/temp": "67500",
            "sys/class/thermal/thermal_zone2/temp": "none",
            f"{FREQUENCY}/scaling_governor": "powersave",
            f"{FREQUENCY}/scaling_driver": "intel_pstate",
            "sys/firmware/acpi/platform_profile": "balanced",
        },
    )
    found = conditions.conditions(system)
    assert found.pop("load_1m") >= 0
    assert found == {
        "power": "battery",
        "temperature_c": 67.5,
        "platform_profile": "balanced",
        "governor": "powersave",
        "driver": "intel_pstate",
    }


def test_conditions_of_a_mac() -> None:
    system = macos(
        {
            "pmset -g batt": b"Now drawing from 'AC Power'\n",
            "pmset -g therm": b"CPU_Speed_Limit \t= 80\n",
            "pmset -g": b" lowpowermode         1\n",
        }
    )
    found = conditions.conditions(system)
    assert found.pop("load_1m") >= 0
    assert found == {"power": "mains", "speed_limit_percent": 80, "low_power_mode": True}


def test_conditions_never_raise() -> None:
    def broken(command: Sequence[str]) -> bytes:
        raise RuntimeError("strange machine")

    found = conditions.conditions(System("darwin", "arm64", Path("/"), lambda: 1, broken))
    assert found["unreadable"] == "strange machine"
    assert math.isfinite(found["load_1m"])
