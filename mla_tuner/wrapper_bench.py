"""Whole attention modules, path by path: the report of `mla-tune bench --wrapper`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from . import bench
from . import device as devices
from .device import Device
from .evidence import MIN_ROUNDS, Measurement
from .measure import Effort, Progress, Runner, machine_lock, measure
from .plan import Plan
from .shapes import Shape
from .wrapper_bench_module import flop
from .wrapper_bench_runner import IsolatedModules
from .wrapper_bench_widths import Widths

PATHS = ("mlx", "single", "split")
TRIAL = Effort(settled=MIN_ROUNDS, most=21, seconds=1.0, least=MIN_ROUNDS)
Row = dict[str, Any]


class Grid(NamedTuple):
    """Shapes to take every combination of."""

    heads: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float16", "bfloat16")


GRIDS = {
    "upstream": Grid((16, 64, 128), (1, 8, 32), (128, 2048, 8192)),  # 54 shapes
    "long": Grid((16, 64, 128), (1, 8), (32768, 65536, 131072)),
}


@dataclass
class Found:
    """What a run measured: by shape and plan a measurement a trial; and what it left out, why."""

    measured: dict[Shape, dict[Plan, list[Measurement]]] = field(default_factory=dict)
    left_out: list[tuple[Shape, str]] = field(default_factory=list)
    gpu_time: bool = False


def run(
    shapes: Sequence[Shape],
    plans: Callable[[Shape], list[Plan]],
    device: Device,
    widths: Mapping[int, Widths],
    *,
    budget_s: float,
    trials: int,
    progress: Progress = lambda measurement: None,
) -> Found:
    """Times a step of whole modules with every plan on every shape, `trials` times.

    Cheap shapes come first; one that would not fit in what is left of `budget_s` seconds is left
    out. Within a trial the plans are timed in shuffled rounds. widths: by heads. progress: told of
    each measurement.

    Raises:
        BusyError: another process is timing on this machine.
    """
    found, deadline = Found(), perf_counter() + budget_s
    with machine_lock(), IsolatedModules(device, widths) as runners:
        for shape in sorted(shapes, key=lambda each: flop(widths[each.heads], each)):
            left = deadline - perf_counter()
            needed = _needed(found, widths, shape, trials)
            if left > max(0.0, needed):
                race = _Race(shape, plans(shape), device, runners(shape, 0), progress)
                found.measured[shape] = race.trials(trials, deadline)
            else:
                found.left_out.append((shape, _short_of_time(left, needed)))
        found.gpu_time = runners.queued()
    return found


def _needed(found: Found, widths: Mapping[int, Widths], shape: Shape, trials: int) -> float:
    """Seconds that a shape takes at least, by the operations of the last one that was timed."""
    for before, plans in reversed(found.measured.items()):
        per_round_s = sum(filter(None, map(_median_us, plans.values()))) * 1e-6
        if per_round_s:
            growth = flop(widths[shape.heads], shape) / flop(widths[before.heads], before)
            return per_round_s * growth * (2 + trials * MIN_ROUNDS)
    return 0.0


def _short_of_time(left: float, needed: float) -> str:
    if left <= 0:
        return "the budget was used up"
    return f"needs about {needed:.0f} s, {left:.0f} s are left"


@dataclass
class _Race:
    """The plans of one shape."""

    shape: Shape
    plans: list[Plan]
    device: Device
    runner: Runner
    progress: Progress

    def trials(self, count: int, deadline: float) -> dict[Plan, list[Measurement]]:
        """Measurements by plan, one a trial; a single one of a plan that can't run.

        Trials share what is left until the deadline, so that a short budget makes each of them
        shorter; none but the first starts after it.
        """
        refused = {
            plan: [Measurement(self.shape, plan, "error", reason)]
            for plan in self.plans
            if (reason := self._refusal(plan))
        }
        for each in refused.values():
            self.progress(each[0])
        asked = [plan for plan in self.plans if plan not in refused]
        found: dict[Plan, list[Measurement]] = {plan: [] for plan in asked}
        for trial in range(count):
            left = deadline - perf_counter()
            if trial and left <= 0:
                break
            for measurement in measure(
                self.shape,
                asked,
                budget_s=left / (count - trial),
                runner=self.runner,
                seed=trial,
                progress=self.progress,
                effort=TRIAL,
            ):
                found[measurement.plan].append(measurement)
        return {plan: {**found, **refused}[plan] for plan in self.plans}

    def _refusal(self, plan: Plan) -> str | None:
        context, new = self.shape.context, self.shape.q_len
        if context < new:
            return f"context {context} does not hold {new} new tokens"
        return bench.refusal(plan, self.shape, self.device)


def report(
    found: Found, device: Device, widths: Mapping[int, Widths], trials: int, command: str
) -> Row:
    """The answer as JSON values: where, with what, and every latency."""
    used = dict.fromkeys(widths[shape.heads] for shape in found.measured)
    return {
        "device": device.key,
        "name": device.name,
        "software": devices.software(),
        "command": command,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "clock": "gpu" if found.gpu_time else "wall",
        "modules": [each._asdict() for each in used],
        "trials": trials,
        "rows": [
            _row(shape, plan, measured, widths[shape.heads])
            for shape, plans in sorted(found.measured.items(), key=_place)
            for plan, measured in plans.items()
        ],
        "left_out": [{"shape": str(shape), "reason": why} for shape, why in found.left_out],
    }


def _place(item: tuple[Shape, object]) -> tuple[object, ...]:
    """Tables read by dtype, heads, batch and context."""
    shape = item[0]
    return shape.layout, shape.q_len, shape.dtype, shape.heads, shape.batch, shape.context


def _row(shape: Shape, plan: Plan, measured: Sequence[Measurement], widths: Widths) -> Row:
    """One plan of one shape. Times are microseconds of one step of the module; `ratio_to_mlx` is
    the median of the trials' speed-ups, each paired within rounds.
    """
    timed = [each for each in measured if each.status == "ok"]
    samples = [us for each in timed for us in each.samples_us]
    ratios = [each.ratio for each in timed if each.ratio is not None]
    executed = {str(each.executed) for each in timed}
    return {
        "module": widths.name,
        "heads": shape.heads,
        "batch": shape.batch,
        "context": shape.context,
        "dtype": shape.dtype,
        "geometry": str(shape.geometry),
        "layout": shape.layout,
        "q_len": shape.q_len,
        "path": plan.path,
        "partitions": plan.partitions,
        "tile": plan.tile,
        "executed": executed.pop() if len(executed) == 1 else None,
        "median_us": _median_us(measured),
        "min_us": min(samples, default=None),
        "max_us": max(samples, default=None),
        "ratio_to_mlx": median(ratios) if ratios else None,
        "max_error": measured[-1].max_error,
        "problem": "" if timed else measured[-1].message,
        "latencies_us": [list(each.samples_us) for each in timed],
    }


def _median_us(measured: Sequence[Measurement]) -> float | None:
    """Over all trials' samples; None where there are none."""
    samples = [us for each in measured for us in each.samples_us]
    return median(samples) if samples else None
