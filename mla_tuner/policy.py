"""The frozen look-up table of a serving process: a shape goes in, a decision comes out.

The first step that answers wins: `off` (MLA_TUNER=off), `frozen` (the required table is not there),
`tuned` (this device, or one just like it, measured this bucket), `fitted` (between two tuned
contexts), `family` (another device of the chip family did), `gates`. Standard library only, and no
file access after `Policy.load`.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from . import backends, family, fits, frozen, gates
from . import device as devices
from .backends import Backend
from .candidates import ASSUMED_CORES, law
from .device import MLX_VERSION, Device
from .errors import StoreError
from .family import Donor
from .fits import Speedups, Tuned
from .frozen import Frozen
from .modes import known_mode
from .plan import MLX, Decision, Plan
from .shapes import DEEPSEEK, MAX_BATCH, Bucket, Geometry, bucket_fields, bucket_of
from .table import Row, default_path, read_rows
from .words import counted

MAX_CACHED = 65536  # decisions; more distinct buckets than any server sees
STEPS = ("off", "frozen", "tuned", "fitted", "family", "gates")  # after the caller's own plan

_HERE = "this device"

log = logging.getLogger("mla_tuner")


@dataclass(frozen=True)
class Step:
    """One step of a look-up: whether it answered, and why or why not. `details` are its numbers."""

    step: str
    answered: bool
    reason: str
    details: tuple[str, ...] = ()


class Policy:
    """Decisions for one device, from `rows`, cached by bucket. Threads may share it.

    off: True, or a reason, makes every decision `mlx`. frozen: digest of the table that `rows` were
    frozen in; with `off`, of the one that is required and not there. system: OS and driver, as
    `device.system_version` says. deterministic: look up as if the batch were 1, so that partitions
    don't depend on it. shared: devices of the family, the nearest first, as `family.load` gives
    them; rows of this very device and these versions count as if they were found here, where none
    was. options: of the command line, for the command that a reason names.
    """

    def __init__(
        self,
        device: Device,
        rows: Iterable[Row] = (),
        *,
        backend: Backend | None = None,
        off: bool | str = False,
        frozen: str = "",
        mlx: str = MLX_VERSION,
        system: str | None = None,
        deterministic: bool = False,
        shared: Sequence[Donor] = (),
        options: str = "",
    ) -> None:
        self.device = device
        self.off = "MLA_TUNER=off" if off is True else off or ""
        self.frozen = frozen
        self.deterministic = deterministic
        self._options = options
        self._backend = backend or backends.get(device.backend)
        self._rows: dict[Bucket, Row] = {}
        self._stale: dict[Bucket, str] = {}
        self._families: dict[Bucket, list[Tuned]] = {}  # by the bucket without context, ascending
        self._cache: dict[tuple[object, int], Decision] = {}  # by bucket and exact batch
        built, reason = self._backend.available()
        self._missing = "" if built else reason
        rows = tuple(rows)
        if system is None:  # on macOS it asks other programs: not for nothing
            system = devices.system_version() if rows or shared else ""
        self._versions = (self._backend.digest(), mlx, system)
        for row in rows:
            if row.counts(*self._versions):
                self._rows[row.bucket] = row
            else:
                self._stale[row.bucket] = self._why_stale(row)
        for bucket, row in sorted(self._rows.items()):
            kin = self._families.setdefault(bucket._replace(context=0), [])
            kin.append(family.tuned(row))
        self._relatives = family.Relatives(shared, device, self._versions)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        device: Device | None = None,
        *,
        deterministic: bool = False,
    ) -> Policy:
        """Read the winners of `device` (this one by default) once: from the database, or from the
        frozen table beside it where MLA_TUNER_FROZEN requires one.

        Never raises for the state of either. A database that is missing, corrupt, locked or of
        another version is left out, and the gates decide; without the required table all is `mlx`.
        Both are one log line.
        """
        device = device or devices.probe()
        if known_mode() == "off":
            return cls(device, off=True, deterministic=deterministic)
        digest = os.environ.get("MLA_TUNER_FROZEN", "")
        if not digest:
            shared, options = _shared(path, device), "" if path is None else _named(Path(path))
            rows = _winners(path, device)
            return cls(device, rows, deterministic=deterministic, shared=shared, options=options)
        table = _required(digest, path, device)
        return cls(
            *(device, table.rows),
            off=table.problem,
            frozen=table.digest,
            deterministic=deterministic,
        )

    def __len__(self) -> int:
        """Buckets tuned here that count."""
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
        if self.deterministic or not 0 < batch <= MAX_BATCH:  # asked here: a call costs more
            batch = self._batch(batch)
        key = bucket_fields(context, batch, heads, dtype, geometry, q_len, layout)
        try:
            return self._cache[key, batch]
        except KeyError:
            return self._look_up(Bucket(*key), batch)

    def explain(
        self,
        context: int,
        batch: int,
        heads: int,
        dtype: str,
        q_len: int = 1,
        geometry: Geometry = DEEPSEEK,
        layout: str = "paged",
    ) -> list[Step]:
        """Every step of `decide` in order, with its numbers; exactly one answered."""
        batch = self._batch(batch)
        bucket = bucket_of(context, batch, heads, dtype, geometry, q_len, layout)
        steps = [Step("caller", False, "a plan given with the call would come first")]
        for name, answer in self._chain(bucket, batch):
            answered = isinstance(answer, Decision)
            reason = answer.reason if isinstance(answer, Decision) else answer
            steps.append(Step(name, answered, reason, tuple(self._details(name, bucket))))
        asked = {step.step for step in steps}
        left = [name for name in STEPS if name not in asked]
        return steps + [Step(name, False, f"not asked: {steps[-1].step} answered") for name in left]

    def _batch(self, batch: int) -> int:
        """The batch that is looked up: any int may come in."""
        return 1 if self.deterministic else max(1, min(batch, MAX_BATCH))

    def _look_up(self, bucket: Bucket, batch: int) -> Decision:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        *_, (_, decision) = self._chain(bucket, batch)
        assert isinstance(decision, Decision)  # the gates always answer
        self._cache[tuple(bucket), batch] = decision
        return decision

    def _chain(self, bucket: Bucket, batch: int) -> Iterator[tuple[str, Decision | str]]:
        """What each step says, up to the first that gives a decision; the others say why not."""
        asks: tuple[Callable[[Bucket, int], Decision | str], ...]
        asks = (
            self._turned_off,
            self._unfrozen,
            self._tuned,
            self._fitted,
            self._borrowed,
            self._gated,
        )
        for name, ask in zip(STEPS, asks, strict=True):
            answer = ask(bucket, batch)
            if not isinstance(answer, Decision):
                yield name, answer
                continue
            if self._missing not in answer.reason and not self.off:
                answer = replace(answer, reason=f"{self._missing}; {answer.reason}")
            yield name, answer
            return

    def _turned_off(self, bucket: Bucket, batch: int) -> Decision | str:
        if self.off and not self.frozen:
            return Decision(MLX, "off", self.off)
        return "MLA_TUNER is not off"

    def _unfrozen(self, bucket: Bucket, batch: int) -> Decision | str:
        if self.off:
            return Decision(MLX, "off", self.off)
        if self.frozen:
            return f"frozen table {self.frozen[:12]} is in use"
        return "no frozen table is required"

    def _tuned(self, bucket: Bucket, batch: int) -> Decision | str:
        row = self._row(bucket)
        if row is None:
            name = f"the bucket of context {bucket.context} and batch {bucket.batch}"
            twins = self._relatives.twin_buckets
            also = f", {twins} on other devices like this" if twins else ""
            others = f"{counted(len(self), 'other')} {'is' if len(self) == 1 else 'are'}{also}"
            return self._stale.get(bucket) or f"{name} is not tuned; {others}"
        refusal = self._refusal(row.plan, bucket)
        if refusal:
            return refusal
        if self._for_batch(row.plan, bucket, batch, family.known(row)) != row.plan:
            return f"tuned at batch {bucket.batch} ({row.plan}), which batch {batch} would not fill"
        where = self._where(bucket)
        when = f"{self._from_frozen()}tuned on {where} {row.day}{self._not_compared(row)}"
        if row.stage == "refute":
            reason = f"{when}: the plan stored before failed `mla-tune verify`: run `mla-tune`"
        elif row.stays:
            reason = f"{when}: nothing beats {row.baseline} at context {bucket.context}"
        else:
            low, high = row.speedup_low, row.speedup_high
            span = "" if low is None or high is None else f" [{low:.3g}, {high:.3g}]"
            gain = f"{row.plan} is {row.speedup:.3g}x {row.baseline}{span}"
            reason = f"{when}: {gain} at context {bucket.context}"
        if row.baseline != MLX.path:
            reason += ", where mlx itself can't run"
        interval = row.speedup_low, row.speedup_high, row.baseline
        return Decision(row.plan, "tuned", reason, row.median_us, row.speedup, *interval)

    def _fitted(self, bucket: Bucket, batch: int) -> Decision | str:
        if self.frozen:
            reason = f"{self._from_frozen()}no plan for this bucket, and nothing else decides"
            return Decision(MLX, "off", reason)
        row = self._row(bucket)
        if row and not self._refusal(row.plan, bucket):
            plan = self._for_batch(row.plan, bucket, batch, family.known(row))
            unknown = self._elsewhere(bucket) + self._not_compared(row)
            tuned = f"tuned at batch {bucket.batch} ({row.plan}){unknown}"
            return Decision(plan, "fitted", f"{self._from_frozen()}{tuned}, cut for batch {batch}")
        ends = self._neighbours(bucket)
        if ends is None:
            contexts = ", ".join(str(each.bucket.context) for each in self._kin(bucket))
            where = f"only at contexts {contexts}" if contexts else "at no context"
            return f"these heads, batch and dtype are tuned {where}: nothing is extrapolated"
        plan = fits.between(bucket, *ends, self.device.cores)
        refusal = self._refusal(plan, bucket)
        if refusal:
            return refusal
        below, above = (f"{end.bucket.context} ({end.plan})" for end in ends)
        unknown = self._elsewhere(*(end.bucket for end in ends))
        unknown += self._not_compared(*filter(None, (self._row(end.bucket) for end in ends)))
        reason = f"{self._from_frozen()}between tuned contexts {below} and {above}{unknown}"
        reason += _why(plan, bucket, *ends)
        share = fits.share_of(bucket.context, *ends)
        speedups = fits.speedups_between(share, *ends)
        return Decision(self._for_batch(plan, bucket, batch, speedups), "fitted", reason)

    def _borrowed(self, bucket: Bucket, batch: int) -> Decision | str:
        """The plan of the nearest device of the family that has one which can run here."""
        refused = ""
        for offer in self._relatives.offers(bucket):
            refusal = self._refusal(offer.plan, bucket)
            if not refusal:
                plan = self._for_batch(offer.plan, bucket, batch, offer.speedups)
                change = "" if plan == offer.plan else f", cut for batch {batch} to {plan}"
                return Decision(plan, "family", f"{offer.reason}{change}")
            refused = refused or f"{refusal}; {offer.reason}"
        return refused or self._relatives.none

    def _gated(self, bucket: Bucket, batch: int) -> Decision:
        plan, reason = gates.gate(bucket, self.device, self._backend, self._options)
        row = self._row(bucket)
        refused = self._refusal(row.plan, bucket) if row else self._stale.get(bucket)
        if refused:  # it is tuned: what the gates say of a bucket that is not helps nobody
            reason = f"{refused}; {reason}" if plan.native else refused
        return Decision(plan, "gates", reason)

    # --- numbers for `explain` ---------------------------------------------------------------

    def _details(self, step: str, bucket: Bucket) -> Iterator[str]:
        row = self._row(bucket) if step == "tuned" else None
        if row:
            where = "here" if bucket in self._rows else "there"
            yield from _speedups(where, family.known(row), row.baseline)
        elif step == "fitted":
            yield from self._fitted_details(bucket)
        elif step == "gates":
            for check in gates.checks(bucket, self.device, self._backend):
                yield f"{check.name}: {'yes' if check.passed else 'no'}, {check.reason}"

    def _fitted_details(self, bucket: Bucket) -> Iterator[str]:
        kin = self._kin(bucket)
        found = fits.threshold_of(kin, self.device.cores)
        ends = self._neighbours(bucket)
        if ends:
            for end in ends:
                where = f"at {end.bucket.context} ({end.plan})"
                yield from _speedups(where, end.speedups, end.baseline)
            share = fits.share_of(bucket.context, *ends)
            between = fits.speedups_between(share, *ends)
            yield from _speedups(f"at {bucket.context}", between, _over(*ends))
        if kin:
            longest = kin[-1].bucket.context
            for what, start in (("native", found.native_from), ("split", found.split_from)):
                where = f"from {start}" if start else f"not even at {longest}, the longest tuned"
                yield f"{what} wins {where}"
        if found.kappa and ends:
            tile = next((each.plan.tile for each in kin if each.plan.path == "split"), "")
            value = law(found.kappa, bucket, tile, self.device.cores or ASSUMED_CORES)
            yield f"the law's constant is {found.kappa:.3g}: {value:.3g} partitions"

    # --- inside ------------------------------------------------------------------------------

    def _row(self, bucket: Bucket) -> Row | None:
        """The own row of a bucket that counts, else one of a twin."""
        own = self._rows.get(bucket)
        return own or next((row for row, _ in self._relatives.twin_rows(bucket)), None)

    def _where(self, bucket: Bucket) -> str:
        if bucket in self._rows:  # a frozen table doesn't say whose they were
            return "a device like this" if self.frozen else _HERE
        twin = next(twin for _, twin in self._relatives.twin_rows(bucket))
        return f"another {twin.name} ({twin.origin})"

    def _elsewhere(self, *buckets: Bucket) -> str:
        """Whose buckets these are, where they are not of this device."""
        others = sorted({self._where(bucket) for bucket in buckets} - {_HERE})
        return f", on {' and '.join(others)}" if others else ""

    def _kin(self, bucket: Bucket) -> list[Tuned]:
        """Tuned buckets that differ in context alone, ascending."""
        own = self._families.get(bucket._replace(context=0), [])
        return family.joined(own, self._relatives.twin_kin(bucket))

    def _neighbours(self, bucket: Bucket) -> tuple[Tuned, Tuned] | None:
        """The tuned buckets with the nearest contexts on both sides."""
        return family.around(bucket, self._kin(bucket))

    def _why_stale(self, row: Row) -> str:
        """Why a row doesn't count; "" where the kernel is missing, which every decision says."""
        kernel, mlx, system = self._versions
        if row.kernel != kernel:
            return "" if self._missing else "tuned with another kernel: run `mla-tune`"
        if row.mlx != mlx:
            return f"tuned with MLX {row.mlx}, this is {mlx}: run `mla-tune verify`"
        return f"tuned on {row.system}, this is {system}: run `mla-tune verify`"

    def _not_compared(self, *rows: Row) -> str:
        if not self._versions[-1]:
            return ", system not compared: this one is unknown"
        if not all(row.system for row in rows):
            return ", system not compared: it was not recorded"
        return ""

    def _from_frozen(self) -> str:
        return f"frozen table {self.frozen[:12]}: " if self.frozen else ""

    def _for_batch(self, plan: Plan, bucket: Bucket, batch: int, speedups: Speedups) -> Plan:
        """The plan cut for the exact batch, where the back end takes that."""
        if self.frozen:  # the table alone decides about rounding
            return plan
        cut = fits.for_batch(plan, bucket, batch, self.device.cores, speedups)
        return plan if self._refusal(cut, bucket) else cut

    def _refusal(self, plan: Plan, bucket: Bucket) -> str | None:
        """A table is foreign data: it never selects what the back end refuses."""
        return self._backend.refusal(plan, bucket.shape) if plan.native else None


def _why(plan: Plan, bucket: Bucket, lower: Tuned, upper: Tuned) -> str:
    """What chose between two ends that differ."""
    if lower.plan.path == upper.plan.path:
        return ""
    between = fits.speedups_between(fits.share_of(bucket.context, lower, upper), lower, upper)
    speedup = between._asdict().get(plan.path)
    if not speedup:
        return f": {plan.path} risks less"
    return f": {plan.path} is about {speedup:.3g}x {_over(lower, upper)}"


def _over(lower: Tuned, upper: Tuned) -> str:
    """What speed-ups between two ends are over."""
    same = lower.baseline == upper.baseline
    return lower.baseline if same else f"{lower.baseline} to {upper.baseline}"


def _speedups(where: str, speedups: Speedups, baseline: str) -> Iterator[str]:
    for path, value in speedups._asdict().items():
        known = "was not measured" if value is None else f"is {value:.3g}x {baseline}"
        yield f"{where} {path} {known}"


def _winners(path: str | Path | None, device: Device) -> list[Row]:
    try:
        return read_rows(Path(path or default_path()), device)
    except StoreError as error:
        log.warning("%s: the gates decide", error)
        return []


def _named(path: Path) -> str:
    """The option that names a database, where it is not the user's."""
    with suppress(StoreError):
        if path == default_path():
            return ""
    return f" --db {shlex.quote(str(path))}"


def _shared(path: str | Path | None, device: Device) -> list[Donor]:
    try:
        database = Path(path or default_path())
    except StoreError:
        database = Path()  # `_winners` says why
    return family.load(device, backends.get(device.backend).digest(), database)


def _required(digest: str, path: str | Path | None, device: Device) -> Frozen:
    """The frozen table beside the database."""
    try:
        table = frozen.read(Path(path or default_path()).parent, digest, device)
    except StoreError as error:
        table = Frozen(digest, problem=str(error))
    if not table.problem:
        plans = counted(len(table.rows), "plan")
        log.info("frozen table %s: %s for %s", table.digest, plans, device.key)
        return table
    problem = f"frozen table {table.digest[:12]} is not used: {table.problem}"
    log.warning("%s; every shape runs mlx", problem)
    return replace(table, problem=problem)


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
