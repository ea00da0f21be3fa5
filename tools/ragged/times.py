"""Seconds of plans on batches of unequal contexts: measured on this machine, and modelled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from pathlib import Path
from statistics import median
from time import perf_counter

from mla_tuner import device
from mla_tuner.candidates import row_groups, rows_per_task
from mla_tuner.evidence import MIN_ROUNDS, paired
from mla_tuner.live import LiveRunners
from mla_tuner.plan import Plan
from mla_tuner.shapes import DTYPE_BYTES, Shape, piece_tokens, pieces
from tools.replay.devices import Hardware

Times = dict[Plan, float]
CALM = 0.03  # of a sample's time, that threads may have waited for a core


# --- measured ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Times of each shape's plans, in units of one of them. `undisturbed` is the share of samples
    in which no thread of ours waited for a core.
    """

    times: dict[Shape, Times]
    rounds: int
    undisturbed: float


def measure(
    shapes: Iterable[Shape], plans: Callable[[Shape], Sequence[Plan]], seconds: float, seed: int = 0
) -> Found:
    """A round times every plan of every shape once, in shuffled order, on cold caches. Only
    times of one round are compared. At least six rounds, whatever `seconds` says.

    Raises:
        RuntimeError: another plan ran than the one asked for.
    """
    runners, rng = LiveRunners(device.probe("cpu")), random.Random(seed)
    asked = {shape: list(plans(shape)) for shape in shapes}
    runners.pool_for(max(asked, key=lambda shape: shape.cache_bytes))  # one serves all
    running = {shape: runners(shape, seed) for shape in asked}
    samples: dict[Shape, dict[Plan, list[float]]] = {s: {p: [] for p in asked[s]} for s in asked}
    rounds, calm, end = 0, [], perf_counter() + seconds
    while rounds < MIN_ROUNDS or perf_counter() < end:
        for shape in rng.sample(list(asked), len(asked)):
            for plan in rng.sample(asked[shape], len(asked[shape])):
                before = _waited()
                took, ran = running[shape].sample(plan, 1)
                calm.append(_waited() - before <= CALM * took)
                if ran != plan:
                    raise RuntimeError(f"{ran} ran instead of {plan}")
                samples[shape][plan].append(took)
        rounds += 1
    times = {shape: relative(timed) for shape, timed in samples.items()}
    return Found(times, rounds, sum(calm) / len(calm))


def relative(samples: dict[Plan, list[float]]) -> Times:
    """Medians of the ratios to the plan with the lowest median, paired within rounds."""
    best = min(samples, key=lambda plan: median(samples[plan]))
    return {plan: median(paired(taken, samples[best])) for plan, taken in samples.items()}


def _waited() -> float:
    """Seconds that our threads could have run and did not; 0 where the system doesn't tell."""
    tasks = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[1]) for task in tasks) * 1e-9


# --- modelled ----------------------------------------------------------------------------------


def modelled(hardware: Hardware, shape: Shape, plan: Plan) -> float:
    """Seconds of a call by the figures of a simulated device.

    Tasks go to the first free slot, a piece of every sequence before the next piece of any, as a
    grid of (row tiles, batch, partitions) does. The memory of the whole device is a floor.
    """
    if not plan.native:  # unequal sequences run one after the other
        if len(set(shape.all_lengths)) == 1:
            return hardware.seconds(shape, plan)
        each = (replace(shape, context=n, batch=1, lengths=()) for n in shape.all_lengths)
        return sum(hardware.seconds(one, plan) for one in each)
    groups, token_bytes = row_groups(shape.rows, plan.tile), _token_bytes(shape)
    tokens = list(tasks(shape, plan.partitions))
    scan = _makespan(hardware, shape, plan, tokens, groups)
    read = sum(shape.all_lengths) * token_bytes * (1 + (groups - 1) / hardware.cache_gain)
    total = hardware.launch_s + max(scan, read / hardware.bandwidth)
    if plan.path == "split":
        parts = shape.rows * len(tokens) * shape.geometry.kv_lora_rank * 8  # written, read
        merge = parts / (hardware.cache_gain * hardware.bandwidth)
        total += hardware.launch_s + hardware.merge_s + merge
    return max(total, (2 if plan.path == "split" else 1) * hardware.host_s)


def _token_bytes(shape: Shape) -> int:
    return shape.geometry.width * DTYPE_BYTES[shape.dtype]


def tasks(shape: Shape, partitions: int) -> Iterator[int]:
    """Tokens of each piece, in the order of the grid."""
    piece = piece_tokens(shape.context, partitions)
    for start in range(0, pieces(shape.context, partitions) * piece, piece):
        yield from (min(piece, n - start) for n in shape.all_lengths if n > start)


def _makespan(
    hardware: Hardware, shape: Shape, plan: Plan, tokens: Sequence[int], groups: int
) -> float:
    cores = hardware.device.cores or 1
    beside = min(hardware.resident, -(-len(tokens) * groups // cores))  # tasks of one core
    rate = min(1.0, beside * hardware.alone) / beside
    rows = -(-min(shape.rows, rows_per_task(plan.tile)) // hardware.row_step) * hardware.row_step
    arithmetic = next(seconds for most, seconds in hardware.token_s if most >= rows) / rate
    token_s = max(arithmetic, _token_bytes(shape) * beside / hardware.core_bandwidth)
    slots = [0.0] * (cores * beside)
    heapify(slots)
    for count in tokens:
        for _ in range(groups):
            heapreplace(slots, slots[0] + hardware.task_s + count * token_s)
    return max(slots)
