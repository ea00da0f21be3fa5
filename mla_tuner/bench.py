"""Every way to run given shapes, side by side in one process: the rows of `mla-tune bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from . import backends
from .candidates import candidates
from .device import Device
from .evidence import Measurement
from .live import IsolatedRunners
from .measure import Progress, machine_lock, measure
from .plan import PATHS, Plan
from .shapes import Bucket, Shape, piece_tokens, pieces
from .words import counted

Row = dict[str, object]


def plans_for(
    shape: Shape,
    device: Device,
    *,
    paths: Sequence[str] = PATHS,
    partitions: Sequence[int] = (),
    every: bool = False,
) -> list[Plan]:
    """The plans to compare on a shape: `mlx`, which all ratios need, and of each other path the
    most promising one.

    `partitions` asks for `split` with exactly these counts instead, whether they can run or not;
    `every` for all the tuner's candidates.
    """
    backend = backends.get(device.backend)
    known = [plan for plan in _known(shape, device) if plan.path in ("mlx", *paths)]
    if not every:
        known = list({plan.path: plan for plan in reversed(known)}.values())[::-1]
    if partitions and "split" in paths:
        tile = next(iter(backend.tiles(shape)), "")
        known = [plan for plan in known if plan.path != "split"]
        known += [Plan("split", count, tile) for count in partitions]
    return known


def refusal(plan: Plan, shape: Shape, device: Device) -> str | None:
    """One sentence why this plan can't run on this shape as it stands; None if it can."""
    count = pieces(shape.context, plan.partitions)
    if count != plan.partitions:
        tokens = piece_tokens(shape.context, plan.partitions)
        return f"context {shape.context} makes only {counted(count, 'piece')} of {tokens} tokens"
    return backends.get(device.backend).refusal(plan, shape, want_lse=True)  # it is checked, too


def _known(shape: Shape, device: Device) -> list[Plan]:
    """The tuner's candidates for exactly this shape, not for the bucket that it is rounded to."""
    exact = Bucket(
        shape.context,
        shape.batch,
        shape.heads,
        shape.dtype,
        *shape.geometry,
        shape.q_len,
        shape.layout,
    )
    return candidates(exact, device, backends.get(device.backend))


def bench(
    shapes: Sequence[Shape],
    plans: Callable[[Shape], list[Plan]],
    *,
    device: Device,
    budget_s: float,
    progress: Progress = lambda measurement: None,
) -> Iterator[Row]:
    """Rows of every plan on every shape; `budget_s` seconds are shared by the shapes.

    All plans of a shape are timed in the same shuffled rounds. A plan that can't run, fails or
    crashes has a row without times; `progress` is told of each measurement, failures with their
    message.

    Raises:
        BusyError: another process is timing on this machine.
    """
    with machine_lock(), IsolatedRunners(device) as runners:
        for shape in shapes:
            asked = plans(shape)
            refused = {
                plan: Measurement(shape, plan, "error", reason)
                for plan in asked
                if (reason := refusal(plan, shape, device))
            }
            for measurement in refused.values():
                progress(measurement)
            runner = runners(shape, 0)
            found = measure(
                shape,
                [plan for plan in asked if plan not in refused],
                budget_s=budget_s / len(shapes),
                runner=runner,
                progress=progress,
            )
            timed = {measurement.plan: measurement for measurement in found}
            clock = "gpu" if runner.queued else "wall"
            yield from ({**row({**timed, **refused}[plan]), "clock": clock} for plan in asked)


def row(measurement: Measurement) -> Row:
    """The JSON row of one measurement; `bench` adds by which clock.

    `gb_per_s` counts the cache once and `gflop_per_s` the operations of the scores and values,
    whatever a path really does. `ratio_to_mlx` is a speed-up: time of `mlx` over time of this plan,
    paired within rounds.
    """
    shape, plan, time_us = measurement.shape, measurement.plan, measurement.median_us
    return {
        "shape": str(shape),
        "path": plan.path,
        "partitions": plan.partitions,
        "tile": plan.tile,
        "median_us": time_us,
        "p10_us": measurement.p10_us,
        "p90_us": measurement.p90_us,
        "ratio_to_mlx": measurement.ratio,
        "gb_per_s": shape.cache_bytes / time_us / 1e3 if time_us else None,
        "gflop_per_s": shape.flop / time_us / 1e3 if time_us else None,
        "max_error": measurement.max_error,
        "executed": str(measurement.executed) if measurement.executed else None,
    }
