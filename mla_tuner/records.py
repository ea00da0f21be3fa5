"""Measurements as rows of the database, and back: what each column must hold."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from .evidence import STATUSES, Measurement
from .plan import Plan
from .shapes import Bucket
from .table import BUCKET_COLUMNS

# SQLite takes any value in any column.
_TEXTS = ("at", "dtype", "layout", "path", "tile", "status", "message", "samples_us")
_COUNTS = ("rounds", "dropped", "inner")
_INTEGERS = (*(name for name in BUCKET_COLUMNS if name not in _TEXTS), "partitions", *_COUNTS)
_NUMBERS = ("max_error", "median_us", "p10_us", "p90_us", "ratio", "ratio_low", "ratio_high")
_MEASURED = ("status", "message", *_COUNTS, *_NUMBERS, "paused_s")
_KIND_NAMES = {str: "text", int: "an integer", float: "a number", NoneType: "NULL"}


def expect(row: Mapping[str, Any], columns: Sequence[str], *kinds: type) -> None:
    """Raise ValueError, with a line that names the column, where one holds another kind."""
    for column in columns:
        if type(row[column]) not in kinds:
            names = " or ".join(_KIND_NAMES[kind] for kind in kinds)
            got = reprlib.repr(row[column])
            raise ValueError(f"expected column {column} as {names}; got {got}")


def to_json(value: object) -> str:
    """Compact text, keys in order; what JSON has no text for as Python's own."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str)


def evidence_row(bucket: Bucket, measurement: Measurement) -> dict[str, Any]:
    """What the table `measurement` keeps; who measured, when and at which stage is added later."""
    return {
        **bucket._asdict(),
        **vars(measurement.plan),
        **{name: getattr(measurement, name) for name in _MEASURED},
        "samples_us": to_json([float(f"{sample:.5g}") for sample in measurement.samples_us]),
        "executed": str(measurement.executed) if measurement.executed else None,
    }


def measurement_of(row: Mapping[str, Any]) -> Measurement:
    """One row of evidence; its `executed` stays text in the row alone.

    Raises:
        ValueError: one line that names the row and what is wrong with it.
    """
    try:
        expect(row, _TEXTS, str)
        expect(row, _INTEGERS, int)
        expect(row, _NUMBERS, int, float, NoneType)
        expect(row, ("paused_s",), int, float)
        if row["status"] not in STATUSES:
            raise ValueError(f"expected column status in {STATUSES}; got {row['status']!r}")
        samples = json.loads(row["samples_us"])
        if not (isinstance(samples, list) and all(type(x) in (int, float) for x in samples)):
            raise ValueError("expected column samples_us as a list of numbers")
        return Measurement(
            shape=Bucket(*(row[name] for name in BUCKET_COLUMNS)).shape,
            plan=Plan(row["path"], row["partitions"], row["tile"]),
            samples_us=tuple(samples),
            **{name: row[name] for name in _MEASURED},
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"measurement {row['id']}: {error}") from error
