"""One run of the real tuner on a machine that isn't there, and the score of a look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mla_tuner.backends import Backend
from mla_tuner.device import MLX_VERSION, Device
from mla_tuner.measure import Runners
from mla_tuner.shapes import Bucket
from mla_tuner.store import Store
from mla_tuner.table import Row
from mla_tuner.tuner import Summary, tune

from .simulate import stage

AMPLE_S = 1e7  # a budget that ends nothing


@dataclass(frozen=True)
class Score:
    """A line of the table. `met` is None where a figure is told without a target."""

    name: str
    measured: str
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Tuned:
    """What a run stored, what it says of itself, and the virtual seconds that it took."""

    rows: dict[Bucket, Row]
    summary: Summary
    spent_s: float


def tuned(
    device: Device,
    backend: Backend,
    runners: Runners,
    buckets: Sequence[Bucket],
    *,
    budget_s: float = AMPLE_S,
    seed: int = 0,
) -> Tuned:
    """Tune those buckets into a database of its own, and read it again as a policy would."""
    started = runners.now()
    with stage(backend), TemporaryDirectory() as folder:
        store = Store(Path(folder) / "lab.db")
        try:
            summary = tune(store, device, buckets, budget_s=budget_s, runners=runners, seed=seed)
            rows = store.tuned(device, backend.digest(), MLX_VERSION)
        finally:
            store.close()
    return Tuned({row.bucket: row for row in rows}, summary, runners.now() - started)


def percent(part: int, whole: int) -> str:
    """A share with the counts behind it."""
    return f"{100 * part / whole:.1f} % ({part} of {whole})" if whole else "nothing to count"
