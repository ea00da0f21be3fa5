"""Whether what runs here is right, and what was stored still true: `mla-tune verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from . import backends
from .backends import Backend
from .cases import Case, Check, check, conformance_subset
from .conditions import clock, settle
from .device import Device, software
from .live import IsolatedRunners
from .measure import machine_lock
from .ops import last_run, mla_decode
from .overview import kernels, native
from .plan import Plan
from .recheck import PlanCheck, Versions, is_wrong, keep, recheck, seconds, stale, tells
from .store import Store, exists
from .table import Row


@dataclass(frozen=True)
class KernelCheck:
    """One kernel variant on all cases that it can run. `variant` names the path and the tile."""

    isa: str
    variant: str
    cases: int
    max_error: float
    ok: bool
    reason: str


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
    with Store(db, create=False, upgrade=True) as store:
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
    if executed != plan.cut(case.shape.context):
        return Check(False, result.max_error, f"{case.shape}: asked for {plan}, ran {executed}")
    return result


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
    """Time stored winners beside `mlx` until `budget_s` is used; results, and how many are left.

    First those of another MLX, OS or driver, then those of an unknown one; what passes counts for
    this one from then on. Then a sample of those that count already. One that is wrong, or slower
    than `mlx`, counts no longer. At least one is timed, the cheapest where none fits. On a machine
    that is not fit for timing only a wrong result is believed and stored; nothing is in a file that
    can't be written.
    """
    end = time.monotonic() + budget_s
    versions = software()
    here = Versions.of(backend.digest(), versions)
    wanted = _wanted(store, device, here)
    rows = [row for row in wanted if seconds(row) <= budget_s] or sorted(wanted, key=seconds)[:1]
    found: list[PlanCheck] = []
    run = None
    with machine_lock(), IsolatedRunners(device) as runners:
        state: dict[str, object] = {}
        if rows:
            state = {**settle(device, force=True), **clock(device, runners.queued())}
        unfit = str(state.get("forced", ""))
        for row in rows:
            needed = seconds(row)
            if found and time.monotonic() + needed > end:
                continue
            progress(f"timing {row.plan} on {row.bucket}")
            runner = runners(row.bucket.shape, 0)
            check, duel = recheck(store, device, row, here, runner=runner, budget_s=needed)
            check = replace(check, believed=not unfit or is_wrong(check))
            why = "" if check.believed else unfit
            why = why if store.writable else "the database can't be written"
            if why and tells(check, here):
                check = replace(check, note=f"not stored, as {why}")
            elif tells(check, here):
                run = run or _start_run(store, device, here, versions, state)
                check = keep(store, run, check, duel)
            found.append(check)
    return found, len(wanted) - len(found)


def _wanted(store: Store, device: Device, here: Versions) -> list[Row]:
    """Stored winners worth timing, the most useful first. MLX's own can't be slower than itself."""
    count = store.tuned(device, here.kernel, here.mlx, here.system)
    unsure = [row for row in count if not here.same(row)]
    sure = [row for row in count if here.same(row) and not row.stays]
    first = [
        row
        for row in (*stale(store, device, here), *unsure)
        if not row.stays or store.rival(device, row)
    ]
    return [*first, *_spread(sure)]


def _spread(rows: list[Row]) -> list[Row]:
    """The same rows, so ordered that any first few are spread over the whole list."""
    order: list[int] = []
    step = 1 << len(rows).bit_length()
    while step > 1:
        order += range(step // 2 - 1, len(rows), step)
        step //= 2
    return [rows[i] for i in order]


def _start_run(
    store: Store,
    device: Device,
    here: Versions,
    versions: Mapping[str, str],
    state: Mapping[str, object],
) -> int:
    return store.start_run(
        device,
        kernel=here.kernel,
        software=versions,
        options={"command": "verify"},
        conditions=state,
    )
