"""Databases with known answers for the tests of `mla-tune report`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from itertools import product
from pathlib import Path

from mla_tuner.device import Device
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store

H200 = Device("cuda", "sm_90", "nvidia-sm90", 132, 140, "NVIDIA H200", 60 << 20)
SOFTWARE = {"mla_tuner": "0.1.0", "mlx": "0.32.4", "os": "Ubuntu", "system": "Ubuntu, driver 580.1"}
OPTIONS = {"budget_s": 300.0, "seed": 0, "force": False, "buckets": 3}
KERNEL = "0123456789abcdef"

SINGLE = Plan("single", 1, "r16")
SPLITS = (Plan("split", 8, "r16"), Plan("split", 16, "r16"), Plan("split", 16, "r8"))
WINNER, BEST = SPLITS[0], SPLITS[1]  # the winner is 2 % behind, with half the partitions
# Times of one call over that of `mlx`.
COSTS = {MLX: 1.0, Plan("mlx_rows"): 0.8, SINGLE: 0.5}
COSTS |= dict(zip(SPLITS, (0.102, 0.1, 0.2), strict=True))


def timed(shape: Shape, plan: Plan, rounds: int, cost: float | None = None) -> Measurement:
    """A plan whose time is its share of `mlx`'s, 1 us for 64 tokens of each sequence."""
    share = COSTS[plan] if cost is None else cost
    us = shape.context * shape.batch / 64 * share
    interval = (0.99 / share, 1.01 / share) if plan != MLX else (1.0, 1.0)
    known = interval if rounds >= 6 else (None, None)
    times = (us, us * 0.97, us * 1.04, 1 / share, *known, (us,) * rounds)
    return Measurement(shape, plan, "ok", "", 1.5e-3, rounds, *times, executed=plan)


def searched(shape: Shape) -> list[Measurement]:
    """Losers leave early; the five last meet in more rounds."""
    rounds = dict.fromkeys(COSTS, 2) | {WINNER: 9, BEST: 9, SINGLE: 9}
    return [timed(shape, plan, rounds[plan]) for plan in COSTS]


def failures(shape: Shape) -> list[Measurement]:
    """One of each kind."""
    return [
        Measurement(shape, Plan("split", 32, "r16"), "wrong", "in float64 it is 0.3", 0.3),
        Measurement(shape, Plan("split", 64, "r16"), "error", "too many threads"),
        Measurement(shape, Plan("split", 4, "r16"), "timeout", "the budget ended"),
    ]


def duelled(shape: Shape, plan: Plan = WINNER, cost: float | None = None) -> list[Measurement]:
    """The baseline and the finalist."""
    return [timed(shape, MLX, 19), timed(shape, plan, 19, cost)]


def fill(
    path: Path,
    contexts: Iterable[int] = (1024, 4096, 32768),
    batches: Iterable[int] = (1, 4),
    heads: Iterable[int] = (16, 128),
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    device: Device = H200,
    mlx: str = "0.32.4",
    kernel: str = KERNEL,
) -> Path:
    """A winner for every shape but one that nothing beat, the first; the last has failures."""
    software = SOFTWARE | {"mlx": mlx}
    versions = {"kernel": kernel, "software": software, "options": OPTIONS}
    with Store(path) as store:
        run = store.start_run(device, **versions, conditions={"clock": "gpu"})  # type: ignore[arg-type]
        shapes = [
            Shape(context, batch, each, dtype)
            for each, dtype, batch, context in product(heads, dtypes, batches, contexts)
        ]
        for shape in shapes:
            more = failures(shape) if shape == shapes[-1] else []
            duel = duelled(shape, WINNER, 0.99 if shape == shapes[0] else None)
            store.record(run, shape.bucket, searched(shape) + more, duel)
    return path


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'`|*[x](javascript:1)"
PLACES = (
    "UPDATE device SET name = ?",
    "UPDATE device SET family = ?",
    "UPDATE run SET software = json_object(?1, ?1)",
    "UPDATE run SET options = json_object(?1, ?1)",
    "UPDATE run SET conditions = json_object('clock', ?1, ?1, ?1)",
    "UPDATE run SET started = ?",
    "UPDATE run SET kernel = ?",
    "UPDATE run SET mlx = ?",
    "UPDATE run SET system = ?",
    "UPDATE plan SET kernel = ?",
    "UPDATE plan SET mlx = ?",
    "UPDATE plan SET system = ?",
    "UPDATE plan SET day = ?",
    "UPDATE plan SET reason = ?",
    "UPDATE plan SET tile = ? WHERE path = 'split'",
    "UPDATE threshold SET kernel = ?",
    "UPDATE threshold SET mlx = ?",
    "UPDATE threshold SET system = ?",
    "UPDATE measurement SET tile = ? WHERE path = 'split' AND tile = 'r16'",
    "UPDATE measurement SET message = ?",
    "UPDATE measurement SET executed = ?",
)


def poison(path: Path) -> None:
    """Markup in every text of a database."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in PLACES:
            connection.execute(statement, [EVIL])
