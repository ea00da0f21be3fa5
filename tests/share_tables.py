"""Databases of an H200 with known winners, and their tables, for the tests of sharing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_tuner import share
from mla_tuner.device import Device
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.share_format import SharedTable
from mla_tuner.store import Store

KERNEL = "0123456789abcdef"
H200 = Device("cuda", "sm_90", "nvidia-sm90", 132, 140, "NVIDIA H200", 60 << 20)
SOFTWARE = {
    "mla_tuner": "0.1.0",
    "mlx": "0.32.4",
    "driver": "580.1",
    "os": "Ubuntu 24.04",
    "kernel": "6.1-somebody",
    "system": "Ubuntu 24.04, driver 580.1",
}
OPTIONS = {"budget_s": 300.0, "seed": 0, "force": False, "buckets": 3}
SPLIT, SINGLE = Plan("split", 40, "r16"), Plan("single", 1, "r64w")
WINNERS = {Shape(32768, 1, 16): SPLIT, Shape(1024, 1, 16): MLX, Shape(8192, 1, 128): SINGLE}


def duel(shape: Shape, plan: Plan, ratio: float = 3.0, rounds: int = 19) -> list[Measurement]:
    """mlx in 123 us, give or take 1 %, and a plan that is faster by `ratio`."""
    us = tuple(123.4 * (1 + (i % 3 - 1) / 100) for i in range(rounds))
    times = (123.4, 122.2, 124.6)
    found = [Measurement(shape, MLX, "ok", "", 2e-3, rounds, *times, 1.0, 1.0, 1.0, us)]
    if plan != MLX:
        spread = (each / ratio for each in times)
        interval = (ratio, ratio * 0.99, ratio * 1.01)
        rival = tuple(each / ratio * (1 + (i % 5 - 2) / 1000) for i, each in enumerate(us))
        found.append(Measurement(shape, plan, "ok", "", 1e-3, rounds, *spread, *interval, rival))
    return found


def start(store: Store, device: Device = H200, kernel: str = KERNEL, **options: object) -> int:
    return store.start_run(
        device,
        kernel=kernel,
        software=SOFTWARE,
        options={**OPTIONS, "db": "/data/x", **options},
        conditions={"user": "somebody", "clock": "gpu"},
    )


def fill(path: Path, device: Device = H200, kernel: str = KERNEL, **options: object) -> Store:
    """A database with one more run; it is open."""
    store = Store(path)
    run = start(store, device, kernel, **options)
    for shape, plan in WINNERS.items():
        found = duel(shape, plan)
        store.record(run, shape.bucket, found, found)
    return store


def table_of(
    path: Path,
    *duels: list[Measurement],
    device: Device = H200,
    kernel: str = KERNEL,
    **options: object,
) -> SharedTable:
    """The table of a database of one run with these duels."""
    with Store(path) as store:
        run = start(store, device, kernel, **options)
        for found in duels:
            store.record(run, found[0].shape.bucket, (), found)
        (table,) = share.tables(store)
    return table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    with fill(tmp_path / "t.db") as store:
        (path,) = share.export(store, tmp_path / "out")
    return path


@pytest.fixture
def any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels here were those of the tables."""
    monkeypatch.setattr("mla_tuner.share_store.refuse_other_kernels", lambda table, name: None)
