"""Stored winners, timed again beside `mlx`: which of them still hold with what runs here now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .candidates import MIN_GAIN
from .device import Device
from .evidence import FAILED, Measurement, baseline, verdict
from .measure import Runner, measure
from .plan import MLX, Plan
from .store import Store
from .table import Row

MIN_SECONDS = 2.0  # for one plan: its inputs, the check against float64, and short rounds
ROUNDS = 8  # enough for an interval, with some to drop
Result = Literal["ok", "undecided", "slower", "wrong"]


@dataclass(frozen=True)
class Versions:
    """What a winner must have been measured with to count: kernel digest, MLX, OS and driver."""

    kernel: str
    mlx: str
    system: str

    @classmethod
    def of(cls, kernel: str, software: Mapping[str, str]) -> Versions:
        """Those of this process, from `device.software()`."""
        return cls(kernel, software["mlx"], software["system"])

    def same(self, row: Row) -> bool:
        """Whether a winner is known to be measured with exactly these: no unknown system is."""
        found = Versions(row.kernel, row.mlx, row.system)
        return bool(self.system) and found == self


@dataclass(frozen=True)
class PlanCheck:
    """One stored winner, timed again: what was measured, and what counts from now on.

    `measurement` is that of the stored plan; where the baseline is, of the plan that came closest
    to it. `now` is the winner that was stored for it, None where nothing was; where that should
    have been, `note` says why it wasn't. Where it is not `believed`, the machine was not fit for
    timing: it may have made the result.
    """

    row: Row
    result: Result
    measurement: Measurement | None
    now: Row | None = None
    note: str = ""
    believed: bool = True


def stale(store: Store, device: Device, here: Versions) -> list[Row]:
    """Winners of buckets that only another MLX, OS or driver keeps from counting, the last of each.

    Without those of another kernel: their plans may mean something else now.
    """
    rows = [row for row in store.plans(device.key) if row.kernel == here.kernel]
    known = {row.bucket for row in rows if row.counts(here.kernel, here.mlx, here.system)}
    last = {row.bucket: row for row in rows if row.bucket not in known}
    refuted = store.refuted(device)
    return [row for row in last.values() if row not in refuted]


def seconds(row: Row) -> float:
    """Time that an interval on this winner takes, from its own times."""
    return MIN_SECONDS + ROUNDS * row.median_us * (1 + row.speedup) / 1e6


def recheck(
    store: Store, device: Device, row: Row, here: Versions, *, runner: Runner, budget_s: float
) -> tuple[PlanCheck, list[Measurement]]:
    """Time one stored winner beside `mlx`, in at most `budget_s` seconds; nothing is stored.

    Where `mlx` could not run it is tried again, beside the path that stood in for it. Returns what
    came out, and the duel for `keep`. A winner of other versions has to clear the baseline as a new
    one would; for one that counts already it is enough not to lose.
    """
    rival = store.rival(device, row) if row.stays else row.plan
    if rival is None:
        return PlanCheck(row, "undecided", None), []
    shape = row.bucket.shape
    defaults = list(dict.fromkeys([MLX, Plan(row.baseline)]))
    plans = [*defaults, rival]
    duel = measure(shape, plans, budget_s=budget_s, runner=runner, baselines=defaults)
    *others, found = duel
    least = 1.0 if here.same(row) else MIN_GAIN
    default = baseline(others) or others[0]
    result = _judge_stay(duel) if row.stays else _judge(default, found, least)
    return PlanCheck(row, result, found), duel


def keep(store: Store, run: int, check: PlanCheck, duel: Sequence[Measurement]) -> PlanCheck:
    """Store what `recheck` found as evidence of `run`, and let what follows from it count.

    A winner that passed counts for the versions of `run`; for one that lost or went wrong the
    baseline does, until its bucket is tuned again. Undecided, it stays what it was.
    """
    bucket = check.row.bucket
    if check.result == "undecided":
        store.record(run, bucket, duel)
        return check
    refutes = check.result != "ok"
    return replace(check, now=store.record(run, bucket, (), duel, refutes=refutes))


def tells(check: PlanCheck, here: Versions) -> bool:
    """Whether a result is news: a winner that counts already was made by a longer duel."""
    lost = check.result in ("slower", "wrong")
    return check.measurement is not None and (lost or not here.same(check.row))


def is_wrong(check: PlanCheck) -> bool:
    """Whether the numbers that came out are wrong: no load does that, but one may end a call."""
    return check.measurement is not None and check.measurement.status == "wrong"


def revalidate(
    store: Store,
    run: int,
    device: Device,
    row: Row,
    here: Versions,
    *,
    runner: Runner,
    budget_s: float,
) -> Row | None:
    """The winner of a bucket after an upgrade, from its old one, if a short duel confirms that.

    row: one of `stale`; run: one of these versions. What was measured is stored either way. None:
    the bucket has to be tuned anew.
    """
    check, duel = recheck(store, device, row, here, runner=runner, budget_s=budget_s)
    if not duel:
        return None
    kept = keep(store, run, check, duel)
    return kept.now if kept.result == "ok" else None


def _judge(default: Measurement, rival: Measurement, least: float) -> Result:
    if default.status in FAILED:  # where that fails too, the plan is not the cause
        return "undecided"
    if rival.status == "wrong" or (rival.status == "error" and default.status == "ok"):
        return "wrong"
    if rival.ratio_low is None or rival.ratio_high is None:
        return "undecided"
    if rival.ratio_high < 1.0:
        return "slower"
    return "ok" if rival.ratio_low > least else "undecided"


def _judge_stay(duel: Sequence[Measurement]) -> Result:
    """Whether the rule that makes winners comes to a verdict, be it the baseline or the rival."""
    return "ok" if verdict(duel) else "undecided"
