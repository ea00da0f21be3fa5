"""Figures with their targets, and the Markdown and JSON made of them."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from mla_tuner import device as devices
from mla_tuner.backends import get
from mla_tuner.conditions import conditions
from mla_tuner.overview import kernels
from tools.peers import torch_cpu

from .rounds import Rounds


@dataclass(frozen=True)
class Figure:
    """One number, and what it is held to.

    target: None for information only. at_least: the target is a lower bound. marked: why it is not
    judged, e.g. the second core was taken. min_us, median_us: of the form that it speaks of.
    """

    section: str
    what: str
    shape: str
    threads: int
    value: float
    unit: str
    target: float | None = None
    at_least: bool = True
    form: str = ""
    min_us: float | None = None
    median_us: float | None = None
    marked: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if self.marked:
            return self.marked
        reached = self.value >= self.target if self.at_least else self.value <= self.target
        return "pass" if reached else "FALLS SHORT"

    def of(self, rounds: Rounds, form: str, note: str = "") -> Figure:
        """The same figure with the times of one form, marked where a core was taken."""
        return replace(
            self,
            form=form,
            min_us=1e6 * rounds.min(form),
            median_us=1e6 * rounds.median(form),
            marked="not judged: cores taken" if rounds.taken else self.marked,
            note=note,
        )


@dataclass(frozen=True)
class FormTime:
    """Times of one form in one set of rounds; `over_best` is against our best form, by minimum."""

    section: str
    shape: str
    threads: int
    form: str
    kind: str
    rounds: int
    min_us: float
    median_us: float
    gflop_per_s: float
    over_best: float
    error: float | None


@dataclass
class Results:
    """Everything a run found."""

    figures: list[Figure]
    forms: list[FormTime]
    notes: list[str]


def header(threads: Sequence[int], argv: Sequence[str]) -> dict[str, str]:
    """What the figures depend on: machine, versions, command line, date."""
    device, backend = devices.probe("cpu"), get("cpu")
    software = devices.software()
    if torch_cpu.available():
        software["torch"] = torch_cpu.version()
    state = conditions()
    return {
        "machine": f"{device.name}; {device.key}; last-level cache {device.cache_bytes >> 20} MB",
        "instruction sets": ", ".join(kernels(backend)),
        "threads": ", ".join(map(str, threads)),
        "versions": ", ".join(f"{name} {value}" for name, value in software.items()),
        "kernel": backend.digest(),
        "pages": os.environ.get("GLIBC_TUNABLES") or "as the system gives them",
        "conditions": ", ".join(f"{name} {value}" for name, value in state.items()),
        "command": shlex.join(["python", "-m", "tools.bench_cpu", *argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "host": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
    }


def markdown(head: dict[str, str], results: Results) -> str:
    """Header, figures with their targets, then the times of every form."""
    lines = [f"- {name}: {value}" for name, value in head.items()]
    lines += ["", *_figures(results.figures), "", *_forms(_worth_showing(results.forms))]
    lines += ["", *(f"- {note}" for note in results.notes)] if results.notes else []
    return "\n".join(lines).rstrip() + "\n"


def as_json(head: dict[str, str], results: Results) -> dict[str, object]:
    return {
        "header": head,
        "figures": [asdict(f) | {"verdict": f.verdict} for f in results.figures],
        "forms": [asdict(f) for f in results.forms],
        "notes": results.notes,
    }


def _figures(figures: Iterable[Figure]) -> list[str]:
    rows = [
        [
            *(f.section, f.what, f.shape, str(f.threads)),
            _number(f.value, f.unit),
            "" if f.target is None else f"{'>=' if f.at_least else '<='} {f.target:g} {f.unit}",
            f.verdict,
            *(f.form, _ms(f.min_us), _ms(f.median_us), f.note),
        ]
        for f in figures
    ]
    names = "section,figure,shape,threads,value,target,verdict,form,min ms,median ms,note"
    return _table(names.split(","), rows)


def _worth_showing(forms: Iterable[FormTime]) -> list[FormTime]:
    """Without our plans that are beaten by another: a figure names the best (JSON has all)."""
    return [f for f in forms if f.kind != "own" or f.over_best == 1.0]


def _forms(forms: Iterable[FormTime]) -> list[str]:
    rows = [
        [
            *(f.section, f.shape, str(f.threads), f.form),
            *(_ms(f.min_us), _ms(f.median_us), _rate(f.gflop_per_s), f"{f.over_best:.2f}"),
            "" if f.error is None else f"{f.error:.1e}",
            str(f.rounds),
        ]
        for f in forms
    ]
    names = "section,shape,threads,form,min ms,median ms,GFLOP/s,over our best,error,rounds"
    return _table(names.split(","), rows) if rows else []


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.4g}"


def _rate(gflop_per_s: float) -> str:
    return f"{gflop_per_s:.1f}" if gflop_per_s else ""


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
