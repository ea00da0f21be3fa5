"""The frozen look-up table of a serving process: a shape goes in, a decision comes out.

The first step that answers wins: `off` (MLA_TUNER=off), `tuned` (this device measured this bucket),
`fitted` (between two tuned contexts), `gates`. Standard library only, and no file access after
`Policy.load`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from . import backends, fits, gates
from . import device as devices
from .backends import Backend
from .device import MLX_VERSION, Device
from .errors import StoreError
from .plan import MLX, Decision, Plan
from .shapes import DEEPSEEK, Bucket, Geometry, bucket_fields
from .table import Row, default_path, read_rows

MAX_CACHED = 65536  # decisions; more distinct buckets than any server sees

log = logging.getLogger("mla_tuner")


class Policy:
    """Decisions for one device, from `rows`, cached by bucket. Threads may share it."""

    def __init__(
        self,
        device: Device,
        rows: Iterable[Row] = (),
        *,
        backend: Backend | None = None,
        off: bool = False,
        mlx: str = MLX_VERSION,
    ) -> None:
        self.device = device
        self.off = off
        self._backend = backend or backends.get(device.backend)
        self._rows: dict[Bucket, Row] = {}
        self._stale: dict[Bucket, str] = {}
        self._ranges: dict[Bucket, list[int]] = {}  # tuned contexts, by the bucket without context
        self._cache: dict[tuple[int | str, ...], Decision] = {}  # a Bucket equals its tuple
        built, reason = self._backend.available()
        self._missing = "" if built else reason
        kernel = self._backend.digest()
        for row in rows:
            if row.kernel != kernel:
                if self._missing:
                    continue  # the kernel is what is stale, and every decision says so
                self._stale[row.bucket] = "tuned with another kernel: run `mla-tune`"
            elif row.mlx != mlx:
                self._stale[row.bucket] = (
                    f"tuned with MLX {row.mlx}, this is {mlx}: run `mla-tune verify`"
                )
            else:
                self._rows[row.bucket] = row
        for bucket in sorted(self._rows):
            self._ranges.setdefault(bucket._replace(context=0), []).append(bucket.context)

    @classmethod
    def load(cls, path: str | Path | None = None, device: Device | None = None) -> Policy:
        """Read the winners of `device` (this one by default) from the database, once.

        Never raises for the database's state: missing, corrupt, locked or newer, it is left out
        with one log line, and the gates decide.
        """
        off = os.environ.get("MLA_TUNER", "").lower() == "off"
        device = device or devices.probe()
        return cls(device, () if off else _winners(path, device), off=off)

    def __len__(self) -> int:
        """Tuned buckets that count here."""
        return len(self._rows)

    def decide(
        self,
        context: int,
        batch: int,
        heads: int,
        dtype: str,
        q_len: int = 1,
        geometry: Geometry = DEEPSEEK,
        layout: str = "paged",
    ) -> Decision:
        """The plan for a shape; `batch` is the effective one. Never raises for ints and strings."""
        key = bucket_fields(context, batch, heads, dtype, geometry, q_len, layout)
        try:
            return self._cache[key]
        except KeyError:
            return self._look_up(Bucket(*key))

    def _look_up(self, bucket: Bucket) -> Decision:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        decision = self._tuned(bucket) or self._fitted(bucket) or self._gated(bucket)
        if self._missing not in decision.reason and not self.off:
            decision = replace(decision, reason=f"{self._missing}; {decision.reason}")
        self._cache[bucket] = decision
        return decision

    def _tuned(self, bucket: Bucket) -> Decision | None:
        if self.off:
            return Decision(MLX, "off", "MLA_TUNER=off")
        row = self._rows.get(bucket)
        if row is None or self._refusal(row.plan, bucket):
            return None
        when = f"tuned on this device {row.day}"
        if row.plan == MLX:
            reason = f"{when}: nothing beats mlx at context {bucket.context}"
        else:
            low, high = row.speedup_low, row.speedup_high
            span = "" if low is None or high is None else f" [{low:.3g}, {high:.3g}]"
            reason = (
                f"{when}: {row.plan} is {row.speedup:.3g}x mlx{span} at context {bucket.context}"
            )
        interval = row.speedup_low, row.speedup_high
        return Decision(row.plan, "tuned", reason, row.median_us, row.speedup, *interval)

    def _fitted(self, bucket: Bucket) -> Decision | None:
        contexts = self._ranges.get(bucket._replace(context=0), [])
        low = max((c for c in contexts if c < bucket.context), default=0)
        high = min((c for c in contexts if c > bucket.context), default=0)
        if not (low and high):
            return None  # nothing is extrapolated
        below, above = (self._rows[bucket._replace(context=c)].plan for c in (low, high))
        plan = fits.between(bucket.context, (low, below), (high, above))
        if plan is None or self._refusal(plan, bucket):
            return None
        return Decision(
            plan, "fitted", f"between tuned contexts {low} ({below}) and {high} ({above})"
        )

    def _gated(self, bucket: Bucket) -> Decision:
        plan, reason = gates.gate(bucket, self.device, self._backend)
        row = self._rows.get(bucket)
        refused = self._refusal(row.plan, bucket) if row else self._stale.get(bucket)
        return Decision(plan, "gates", f"{refused}; {reason}" if refused else reason)

    def _refusal(self, plan: Plan, bucket: Bucket) -> str | None:
        """A table is foreign data: it never selects what the back end refuses."""
        return self._backend.refusal(plan, bucket.shape) if plan.native else None


def _winners(path: str | Path | None, device: Device) -> list[Row]:
    try:
        return read_rows(Path(path or default_path()), device)
    except StoreError as error:
        log.warning("%s: the gates decide", error)
        return []


_current: Policy | None = None
_current_lock = threading.Lock()


def current() -> Policy:
    """The policy of this process: loaded at the first call, then shared by all threads."""
    global _current
    if _current is None:
        with _current_lock:
            if _current is None:
                _current = Policy.load()
    return _current
