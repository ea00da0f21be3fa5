"""Text of command-line values to numbers, words and lists. A ValueError says what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from shutil import which
from typing import TypeVar

from .shapes import DTYPES

Value = TypeVar("Value")

_SHIFTS = {"": 0, "k": 10, "m": 20}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
DTYPE_NAMES = {name: name for name in DTYPES} | {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
}


def count(low: int, high: int) -> Callable[[str], int]:
    """Whole numbers from `low` to `high`; k and m stand for 1024 and 1048576."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.strip().lower())
        number = int(match[1]) << _SHIFTS[match[2]] if match else -1
        if not low <= number <= high:
            example = "" if high < 4096 else ", such as 4096 or 4k"
            raise ValueError(f"expected {low}..{high}{example}; got {text!r}")
        return number

    return parse


def word(names: Mapping[str, Value]) -> Callable[[str], Value]:
    """What a known word stands for, in any case."""

    def parse(text: str) -> Value:
        found = names.get(text.strip().lower())
        if found is None:
            raise ValueError(f"expected one of {', '.join(names)}; got {text!r}")
        return found

    return parse


def several(
    each: Callable[[str], Value], *, repeats: bool = False
) -> Callable[[str], tuple[Value, ...]]:
    """Comma-separated values; each counts once, unless `repeats`."""

    def parse(text: str) -> tuple[Value, ...]:
        found = [each(part) for part in text.split(",")]
        return tuple(found if repeats else dict.fromkeys(found))

    return parse


def duration(text: str) -> float:
    """90s, 5m or 1h, in seconds; a plain number counts seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"expected a time such as 90s, 5m or 1h; got {text!r}")
    return seconds


def program(called: str) -> str:
    """`mla-tune` as the user's shell finds it: by the path it was called by where not on PATH."""
    return called if called.endswith("/mla-tune") and not which("mla-tune") else "mla-tune"
