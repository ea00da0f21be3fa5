"""What works on this machine, and why not what doesn't: the facts behind `mla-tune probe`."""

from __future__ import annotations

import os
import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any

from . import backends, device
from .backends import Backend
from .conditions import conditions
from .device import MLX_VERSION, Device
from .errors import DeviceError, StoreError, plain
from .plan import Plan
from .shapes import Shape
from .store import exists
from .table import Row, rows_of

USUAL_HEADS = (1, 2, 4, 8, 16, 128)  # of a device: few where a model is spread over many
VARIABLES = ("MLA_TUNER", "MLA_TUNER_DB", "MLA_TUNER_FROZEN", "MLA_TUNER_THREADS")
COST = (
    "without the native kernel only the paths mlx and mlx_rows run here: "
    "no context is ever split, and a decode step costs what MLX makes it cost"
)


def overview(here: Device, db: Path) -> dict[str, object]:
    """The answer of `mla-tune probe --json` for the device `here` and the database `db`.

    Runs the kernel's self-check; raises nothing for what is merely missing.
    """
    backend = backends.get(here.backend)
    available, _ = backend.available()
    checked, reason = backend.self_check() if available else (False, "")
    return {
        "device": here.key,
        "name": here.name,
        "family": here.family,
        "cores": here.cores,
        "memory_gb": here.memory_gb,
        "cache_bytes": here.cache_bytes,
        "cache_source": cache_source(here),
        "software": device.software(),
        "conditions": conditions(),
        "backends": [backend_facts(name) for name in backends.NAMES],
        "self_check": {"ok": checked, "reason": reason} if available else None,
        "cost": None if available else COST,
        "db": db_facts(db, here, backend),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cache_source(here: Device) -> str:
    """Where the size of the last-level cache comes from."""
    if here.backend == "cpu":
        return device.last_level_cache()[1]
    if here.backend == "metal":
        return "not told by Apple chips; the largest known is assumed"
    return "driver" if here.cores else f"unknown; {device.DEFAULT_CACHE_BYTES >> 20} MB assumed"


def backend_facts(name: str) -> dict[str, object]:
    """Whether a back end's device and native kernels are here, and why not."""
    backend = backends.get(name)
    here, native = True, False
    try:
        device.probe(name)
        native, reason = backend.available()
    except DeviceError as error:
        here, reason = False, str(error)
    return {
        "name": name,
        "device": here,
        "native": native,
        "kernels": kernels(backend) if native else [],
        "refused": refused(backend) if native else [],
        "reason": "" if native else reason,
    }


def kernels(backend: Backend) -> list[str]:
    """Variants of the native kernel that run here: a CPU's instruction sets, the one in use first,
    or a GPU's tiles.
    """
    if not backend.available()[0]:
        return []
    if backend.name != "cpu":
        return [tile for tile, reason in _tiles(backend).items() if reason is None]
    in_use = native().isa()
    return sorted(native().isas(), key=lambda isa: isa != in_use)


def refused(backend: Backend) -> list[str]:
    """Why tiles of usual shapes don't run here; each is tried once, and may be compiled for it."""
    return [reason for reason in _tiles(backend).values() if reason is not None]


def _tiles(backend: Backend) -> dict[str, str | None]:
    """The tiles of one sequence's usual rows, and the refusal of each."""
    shapes = [Shape(2048, 1, heads) for heads in USUAL_HEADS]
    return {
        tile: backend.refusal(Plan("single", 1, tile), shape)
        or backend.refusal(Plan("split", 2, tile), shape)
        for shape in shapes
        for tile in backend.tiles(shape)
    }


def native() -> Any:
    """The compiled module, for callers that know it is available; the build may have made none."""
    return import_module(f"{__package__}._native")


def db_facts(path: Path, here: Device, backend: Backend) -> dict[str, object]:
    """State of a database for a device; the file is only read, and need not exist.

    `problem`: why it can't be used; the counts are 0 then. `plans` counts tuned buckets that hold
    here, `other_mlx` those of another MLX, OS or driver that `verify` can make hold, and
    `other_kernel` those that must be tuned anew.
    """
    try:
        there, problem = exists(path), ""
    except StoreError as error:
        there, problem = False, str(error)
    rows: list[Row] = []
    if there:
        try:
            rows = rows_of(path, here)
        except (sqlite3.Error, OSError, ValueError) as error:
            problem = f"{path} is not used: {plain(error)}"
    ours = [row for row in rows if row.kernel == backend.digest()]
    versions = backend.digest(), MLX_VERSION, device.system_version()
    plans = {row.bucket for row in ours if row.counts(*versions)}
    other_mlx = {row.bucket for row in ours} - plans
    return {
        "path": str(path),
        "exists": there,
        "problem": problem,
        "plans": len(plans),
        "other_mlx": len(other_mlx),
        "other_kernel": len({row.bucket for row in rows} - plans - other_mlx),
    }
