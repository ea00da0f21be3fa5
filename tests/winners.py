"""Stored winners for tests of the policy: as rows, and as a database."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fakes import make_device

from mla_tuner.device import MLX_VERSION
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape, bucket_of
from mla_tuner.store import Store
from mla_tuner.table import Row

SPLIT = Plan("split", 2, "r16")


def row(context: int = 32768, plan: Plan = SPLIT, **changes: object) -> Row:
    interval = (None, None) if plan == MLX else (104.0, 118.0)
    bucket = bucket_of(context, 1, 16, "bfloat16")
    speedup = 1.0 if plan == MLX else 112.0
    made = Row(
        *(bucket, plan, 4000.0, speedup, *interval, "2026-11-29", "digest", MLX_VERSION),
        *("", None, speedup if plan.path == "split" else None),
    )
    return made._replace(**changes)


def write(path: Path, *contexts: int, kernel: str = "digest", plan: Plan = SPLIT) -> None:
    """A store with a winner per context."""
    with Store(path) as store:
        run = store.start_run(make_device(), kernel=kernel, software={"mlx": MLX_VERSION})
        for context in contexts:
            shape = Shape(context, 1, 16)
            duel = [
                Measurement(shape, MLX, rounds=6, median_us=9000.0, ratio=1.0),
                Measurement(shape, plan, "ok", "", 1e-3, 6, 90.0, 89.0, 92.0, 100.0, 95.0, 105.0),
            ]
            store.record(run, shape.bucket, [], duel)


def assert_one_line(caplog: pytest.LogCaptureFixture, text: str) -> None:
    assert [(r.name, r.levelno) for r in caplog.records] == [("mla_tuner", logging.WARNING)]
    assert text in caplog.messages[0]
    assert "\n" not in caplog.messages[0]
