"""Merges of tables at the edge of what the format takes: any order, and the result is a table."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from share_tables import H200, KERNEL

from mla_tuner import share
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Bucket, Shape
from mla_tuner.share_format import SharedEntry, SharedRun, SharedTable, parse, run_id, settled

SYSTEMS = ("Ubuntu 24.04, driver 580.1", "Ubuntu 26.04, driver 600.2")
SHAPES = (
    Shape(32768, 1, 16),
    Shape(1 << 20, 1, 16),
    Shape(2048, 4, 16),
    Shape(8192, 1, 16, "float16"),
)
PLANS = (
    MLX,
    Plan("mlx_rows"),
    Plan("split", 2, "r16"),
    Plan("split", 16, "r16"),
    Plan("single", 1, "r64w"),
)
TIMES = (1e-3, 1e9, 0.1, 1.0, 123.4, 123.5, 125.9)
SPEEDUPS = (1e-12, 1e12, 0.98, 1.0, 1.02, 1.021, 3.0)
WHERE = Path("nvidia-sm90.json")


def facts(system: str, name: str) -> dict[str, Any]:
    known = ("key", "backend", "architecture", "cores", "memory_gb", "cache_bytes")
    versions = {"kernel": KERNEL, "mlx": "0.32.4", "system": system}
    return {**{each: getattr(H200, each) for each in known}, "name": name, **versions}


def runs_of(system: str) -> list[SharedRun]:
    found = []
    for i in range(5):
        told = {
            "nonce": f"{i:016x}",
            "day": f"2026-11-{10 + i % 2}",  # some of the same day
            "clock": "gpu",
            "software": {"mla_tuner": "0.1.0", "mlx": "0.32.4", "os": "Ubuntu"},
            "options": {"seed": i, "force": i % 2 == 0, "budget_s": 0.5},
        }
        found.append(SharedRun(id=run_id((H200.key, KERNEL, "0.32.4", system), told), **told))
    return found


def an_entry(run: SharedRun, rng: random.Random) -> SharedEntry:
    """One that the format takes: a duel, a failure, or a baseline that nothing came close to."""
    plan, baseline = rng.choice(PLANS), rng.choice(("mlx", "mlx", "mlx", "mlx_rows"))
    rounds = rng.choice((1, 5, 6, 7, 19))
    base = tuple(rng.choice(TIMES) for _ in range(rounds))
    ours = tuple(rng.choice(TIMES) for _ in range(rng.choice((rounds, rng.randrange(1, 20)))))
    failed = rng.choice(("", "", "", "wrong", "error")) if plan.path != baseline else ""
    best = [plan for plan in PLANS if plan.native and rng.random() < 0.5][-2:]
    values: Mapping[str, Any] = {
        **vars(plan),
        "failed": failed,
        "max_error": rng.choice((None, 0.0, 2e-3, 1e300)),
        "samples_us": () if failed or plan.path == baseline else ours,
        "baseline": baseline,
        "baseline_samples_us": base,
        "best": tuple({**vars(each), "speedup": rng.choice(SPEEDUPS)} for each in best),
    }
    return SharedEntry(run=run.id, day=rng.choice((run.day, "2026-11-30")), **values)


def a_table(rng: random.Random) -> SharedTable:
    """Of one or two systems; two tables may tell different things of the same run and device."""
    devices = []
    for system in sorted(rng.sample(SYSTEMS, rng.choice((1, 2)))):
        runs = runs_of(system)
        evidence: dict[Bucket, list[SharedEntry]] = {}
        for shape in rng.sample(SHAPES, rng.randrange(1, len(SHAPES) + 1)):
            chosen = rng.sample(runs, rng.randrange(1, 5))
            evidence[shape.bucket] = [an_entry(run, rng) for run in chosen]
        device = settled(facts(system, rng.choice(("NVIDIA H200", "H200"))), runs, evidence)
        assert device is not None
        devices.append(device)
    return SharedTable(version=2, family=H200.family, devices=tuple(devices))


@pytest.mark.parametrize("seed", range(25))
def test_a_merge_of_tables_is_a_table_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    a, b, c = (a_table(rng) for _ in range(3))
    for each in (a, b, c):
        assert share.faults(share.render(each), WHERE) == []
    merged, render = share.merged, share.render
    text = render(merged(merged(a, b), c))
    assert share.faults(text, WHERE) == []
    assert text == render(merged(a, merged(b, c))) == render(merged(merged(c, a), b))
    assert render(merged(a, b)) == render(merged(b, a))
    assert render(merged(a, a)) == render(a)
    again = parse(text)
    assert render(again) == text
    for each in (a, b, c):
        assert render(merged(again, each)) == text
