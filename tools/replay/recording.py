"""Recorded sweeps: every plan's raw times on one device, shape by shape, as a JSON file.

    {"format": 1,
     "device": {"backend", "architecture", "family", "cores", "memory_gb", "name", "cache_bytes"},
     "kernel": digest of the kernels that ran ("" where there are none),
     "software": {"mlx": "0.32.4", ...}, "system": OS and driver version,
     "date": ISO, UTC, "command": what made the file, "measured": one sentence,
     "sweeps": [
       {"shape": {"context", "batch", "heads", "dtype", "kv_lora_rank", "rope_dim", "q_len",
                  "layout"},
        "plans": ["mlx", "mlx_rows", "single r16", "split x2 r16", ...],
        "first_us": [time of each plan's first call],
        "samples_us": [[one time a round, for each plan in turn]]}]}

Times are microseconds of one call. Column i of `samples_us` is round i: all plans one after the
other, in shuffled order, so that ratios pair within it. `null`: not timed in that round; a plan
that is far behind needs no more than the first few. `mlx` comes first, the other plans in the order
of `candidates`, whose first tile is the back end's default. The shape is exact: no bucket's
rounding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_tuner.device import Device
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Geometry, Shape

FORMAT = 1
MIN_ROUNDS = 6  # fewer give no interval
SHAPE_KEYS = (
    *("context", "batch", "heads", "dtype"),
    *("kv_lora_rank", "rope_dim", "q_len", "layout"),
)

Samples = tuple[float | None, ...]  # one a round


@dataclass(frozen=True)
class Sweep:
    """All plans of one shape. Times in microseconds of one call; None: not timed in that round."""

    shape: Shape
    samples: Mapping[Plan, Samples]
    first_us: Mapping[Plan, float]

    @property
    def rounds(self) -> int:
        return len(self.samples[MLX])


@dataclass
class Recording:
    """Sweeps of one device, and where they come from."""

    device: Device
    kernel: str
    software: dict[str, str]
    system: str
    date: str
    command: str
    measured: str
    sweeps: dict[Shape, Sweep] = field(default_factory=dict)


def load(path: Path) -> Recording:
    """Read a recording.

    Raises:
        ValueError: one line with the file's name and what is wrong in it.
        OSError: it can't be read.
    """
    text = path.read_text()
    try:
        return _recording(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path.name} is no recording of format {FORMAT}: {what}") from error


def save(recording: Recording, path: Path) -> None:
    """Write it whole or not at all; one line a plan, so that a diff says what changed."""
    head = {
        "format": FORMAT,
        "device": asdict(recording.device),
        **{name: getattr(recording, name) for name in _PROVENANCE},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    sweeps = ",\n".join(_sweep_text(sweep) for sweep in recording.sweeps.values())
    text = "{" + ",\n".join([*lines, f'"sweeps": [\n{sweeps}\n]']) + "}\n"
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    os.replace(beside, path)


def plan_of(text: str) -> Plan:
    """A plan from the text that `str(plan)` gives: path, then "x8" and "r16" where it has them."""
    path, *rest = text.split()
    partitions, tile = 1, ""
    for word in rest:
        if word.startswith("x"):
            partitions = int(word[1:])
        else:
            tile = word
    return Plan(path, partitions, tile)


_PROVENANCE = ("kernel", "software", "system", "date", "command", "measured")


def _recording(data: Any) -> Recording:
    if data["format"] != FORMAT:
        raise ValueError(f"it has format {data['format']}")
    sweeps = [_sweep(entry) for entry in data["sweeps"]]
    return Recording(
        Device(**data["device"]),
        **{name: data[name] for name in _PROVENANCE},
        sweeps={sweep.shape: sweep for sweep in sweeps},
    )


def _sweep(entry: Any) -> Sweep:
    context, batch, heads, dtype, rank, rope, q_len, layout = (
        entry["shape"][k] for k in SHAPE_KEYS
    )
    shape = Shape(context, batch, heads, dtype, Geometry(rank, rope), q_len, layout)
    plans = [plan_of(text) for text in entry["plans"]]
    samples = [tuple(row) for row in entry["samples_us"]]
    if plans[:1] != [MLX] or len(set(plans)) != len(plans):
        raise ValueError(f"expected mlx first and each plan once at {shape}")
    if {len(row) for row in samples} != {len(samples[0])} or len(samples[0]) < MIN_ROUNDS:
        raise ValueError(f"expected {MIN_ROUNDS} or more rounds of every plan at {shape}")
    if any(not (time is None or 0 < time < float("inf")) for row in samples for time in row):
        raise ValueError(f"expected times above 0 or null at {shape}")
    if any(all(time is None for time in row) for row in samples):
        raise ValueError(f"expected a time of every plan at {shape}")
    return Sweep(
        shape,
        dict(zip(plans, samples, strict=True)),
        dict(zip(plans, entry["first_us"], strict=True)),
    )


def _sweep_text(sweep: Sweep) -> str:
    shape = sweep.shape
    values = (
        *(shape.context, shape.batch, shape.heads, shape.dtype),
        *(*shape.geometry, shape.q_len, shape.layout),
    )
    rows = [f" {_times(row)}" for row in sweep.samples.values()]
    return (
        f'{{"shape": {json.dumps(dict(zip(SHAPE_KEYS, values, strict=True)))},\n'
        f'"plans": {json.dumps([str(plan) for plan in sweep.samples])},\n'
        f'"first_us": {_times(list(sweep.first_us.values()))},\n'
        f'"samples_us": [\n' + ",\n".join(rows) + "]}"
    )


def _times(times: Samples | list[float]) -> str:
    """Four digits: a thousandth is below any noise."""
    return json.dumps([None if t is None else _short(t) for t in times], separators=(",", ":"))


def _short(value: float) -> float | int:
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded
