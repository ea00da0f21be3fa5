"""Whether what runs here is right, and what was stored still true: `mla-tune verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from . import backends
from .backends import Backend
from .candidates import pieces
from .cases import Case, Check, check, conformance_subset
from .device import MLX_VERSION, Device, conditions, software
from .evidence import Measurement
from .measure import LiveRunners, machine_lock, measure
from .ops import last_run, mla_decode
from .overview import kernels, native
from .plan import MLX, Plan
from .store import Store, exists
from .table import Row

MIN_SECONDS = 2.0  # for one plan: its inputs, the check against float64, and short rounds
ROUNDS = 8  # enough for an interval, with some to drop
Result = Literal["ok", "undecided", "slower", "wrong"]


@dataclass(frozen=True)
class KernelCheck:
    """One kernel variant on all cases that it can run. `variant` names the path and the tile."""

    isa: str
    variant: str
    cases: int
    max_error: float
    ok: bool
    reason: str


@dataclass(frozen=True)
class PlanCheck:
    """One stored plan, timed again beside `mlx`."""

    row: Row
    result: Result
    measurement: Measurement | None

    @property
    def settled(self) -> bool:
        """Whether this is enough for a verdict: with too few rounds, `mlx` would win by default."""
        known = self.measurement is not None and self.measurement.ratio_low is not None
        return known or self.result == "wrong"


def verify(
    device: Device, db: Path, budget_s: float, progress: Callable[[str], None]
) -> tuple[list[KernelCheck], list[PlanCheck], int]:
    """Both halves within about `budget_s` seconds: kernels, plans, and plans that were left.

    A database that is not there is not made. `progress` is told what is being done.
    """
    started = time.monotonic()
    backend = backends.get(device.backend)
    progress("checking every kernel variant")
    if not exists(db):
        return check_kernels(backend), [], 0
    with Store(db, create=False) as store:
        checked = check_kernels(backend)
        left = budget_s - (time.monotonic() - started)
        return checked, *check_plans(store, device, backend, budget_s=left, progress=progress)


def check_kernels(backend: Backend) -> list[KernelCheck]:
    """Every kernel variant of every instruction set that runs here, against float64 references."""
    found: list[KernelCheck] = []
    isas = kernels(backend) if backend.name == "cpu" else []
    subset = list(conformance_subset(backend))
    for isa in isas or [""]:  # one nameless set where there is no choice
        with _isa(isa):
            checks: dict[str, list[Check]] = {}
            for _, case, plan in subset:
                if plan.native or not found:  # the mlx paths once
                    variant = f"{plan.path} {plan.tile}".strip()
                    checks.setdefault(variant, []).append(run_case(case, plan))
        found += [_summary(isa, variant, results) for variant, results in checks.items()]
    return found


def run_case(case: Case, plan: Plan) -> Check:
    """Run one case through the front door; wrong also where another plan ran than asked for."""
    try:
        out, lse = mla_decode(
            case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
        )
        mx.eval(out, lse)
    except Exception as error:  # a failing kernel is a finding, not the end of the check
        return Check(False, float("inf"), f"{case.shape}: {plan}: {error}")
    result = check(case, out, lse, plan)
    if not result.ok:
        return Check(False, result.max_error, f"{case.shape}: {plan}: {result.reason}")
    run = last_run()
    executed = run.executed if run else None
    if executed != _expected(plan, case.shape.context):
        return Check(False, result.max_error, f"{case.shape}: asked for {plan}, ran {executed}")
    return result


def _expected(plan: Plan, context: int) -> Plan:
    """What runs when `plan` is asked for: a short context is cut in fewer pieces, or not at all."""
    if not plan.native:
        return plan
    count = pieces(context, plan.partitions)
    return Plan("split" if count > 1 else "single", count, plan.tile)


def _summary(isa: str, variant: str, results: Sequence[Check]) -> KernelCheck:
    bad = next((result for result in results if not result.ok), None)
    worst = max(result.max_error for result in results)
    name = isa if variant.split()[0] in ("single", "split") else "mlx"
    return KernelCheck(name, variant, len(results), worst, bad is None, bad.reason if bad else "")


@contextmanager
def _isa(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    before = native().isa()
    native().set_isa(name)
    try:
        yield
    finally:
        native().set_isa(before)


def check_plans(
    store: Store,
    device: Device,
    backend: Backend,
    *,
    budget_s: float,
    progress: Callable[[str], None],
) -> tuple[list[PlanCheck], int]:
    """Time stored plans beside `mlx` until `budget_s` is used; the results, and how many were left.

    Plans found with another MLX release come first. What is measured of them becomes evidence for
    this release, so those that pass count from then on. At least one plan is timed, the cheapest
    where none fits.
    """
    end = time.monotonic() + budget_s
    kernel, runners = backend.digest(), LiveRunners(device)
    wanted = _wanted(store, device, kernel)
    rows = [row for row in wanted if _seconds(row) <= budget_s] or sorted(wanted, key=_seconds)[:1]
    found: list[PlanCheck] = []
    run = None
    with machine_lock():
        for row in rows:
            seconds = _seconds(row)
            if found and time.monotonic() + seconds > end:
                continue
            progress(f"timing {row.plan} on {row.bucket}")
            shape, plans = row.bucket.shape, [MLX, row.plan]
            duel = measure(shape, plans, device=device, budget_s=seconds, runner=runners(shape, 0))
            checked = PlanCheck(row, *_judge(duel))
            found.append(checked)
            if row.mlx != MLX_VERSION and checked.settled:
                run = run or _start_run(store, device, kernel)
                store.record(run, row.bucket, (), duel)
    return found, len(wanted) - len(found)


def _wanted(store: Store, device: Device, kernel: str) -> list[Row]:
    """Stored plans worth timing: first those that only another MLX release keeps from counting."""
    rows = [row for row in store.plans(device.key) if row.kernel == kernel and row.plan != MLX]
    known = {row.bucket for row in store.tuned(device, kernel, MLX_VERSION)}
    stale = _newest(row for row in rows if row.bucket not in known)
    return stale + _spread([row for row in rows if row.mlx == MLX_VERSION])


def _seconds(row: Row) -> float:
    """Time that an interval on this row takes, from its own times."""
    return MIN_SECONDS + ROUNDS * row.median_us * (1 + row.speedup) / 1e6


def _newest(rows: Iterable[Row]) -> list[Row]:
    """One row a bucket: several MLX releases may have left theirs."""
    return list({row.bucket: row for row in sorted(rows, key=lambda row: row.day)}.values())


def _spread(rows: list[Row]) -> list[Row]:
    """The same rows, so ordered that any first few are spread over the whole list."""
    order: list[int] = []
    step = 1 << len(rows).bit_length()
    while step > 1:
        order += range(step // 2 - 1, len(rows), step)
        step //= 2
    return [rows[i] for i in order]


def _judge(duel: Sequence[Measurement]) -> tuple[Result, Measurement | None]:
    rival = next((m for m in duel if m.plan != MLX), None)
    if rival is not None and rival.status in ("wrong", "error"):
        return "wrong", rival
    if rival is None or rival.ratio_low is None or rival.ratio_high is None:
        return "undecided", rival
    if rival.ratio_high < 1.0:
        return "slower", rival
    return ("ok" if rival.ratio_low > 1.0 else "undecided"), rival


def _start_run(store: Store, device: Device, kernel: str) -> int:
    return store.start_run(
        device,
        kernel=kernel,
        software=software(),
        options={"command": "verify"},
        conditions=conditions(),
    )
