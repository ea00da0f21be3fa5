"""Tuning together: several machines of one kind split the buckets, and each gets all winners."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import Any

from . import backends, tuner
from . import device as devices
from .device import Device
from .errors import StoreError
from .evidence import Measurement, verdict
from .fleet_study import LIVES, Attempt, FleetStudy
from .measure import Runners, one_line
from .plan import Plan
from .recheck import Versions
from .records import measurement_of
from .shapes import Bucket
from .share_rows import imported_nonce, nonce
from .store import Store
from .table import Row, open_read_only
from .tuner import BucketSkipped, Clock, Event, Summary, Work

POLL_S = 2.0  # between looks at what the others finished
STAGES = ("search", "duel")  # of the evidence that makes a winner
OF_RUN = ("device", "kernel", "mlx", "system", "run")  # what `Store.evidence` adds


def tune(
    url: str,
    store: Store,
    device: Device,
    buckets: Sequence[Bucket],
    *,
    note: Callable[[str], None],
    budget_s: float,
    progress: Callable[[Event], None] | None = None,
    runners: Runners | None = None,
    force: bool = False,
) -> Summary:
    """`tuner.tune`, of those buckets that no other machine of the fleet at `url` is at.

    All that the fleet finished is stored here too, as runs of their own: ratios stay paired within
    the machine that measured them. Ends when no bucket is left to take or to wait for, or with the
    budget. What this machine had tuned before is given to the others. note: takes one sentence.

    Raises:
        FleetError: the database can't be used, or is that of other machines; what was tuned is
            stored here.
        BudgetError, BusyError, DeviceError, StoreError: as `tuner.tune`.
    """
    buckets = list(dict.fromkeys(buckets))
    versions = Versions.of(backends.get(device.backend).digest(), devices.software())
    named = (f"kernel {versions.kernel}", f"MLX {versions.mlx}", versions.system or "no system")
    with FleetStudy(url, (device.key, *named)) as study:
        member = _Member(study, store, device, versions, buckets, note)
        member.exchange()
        member.tell()
        summary = tuner.tune(
            *(store, device, buckets),
            budget_s=budget_s,
            progress=progress,
            runners=runners,
            force=force,
            dispatch=member.dispatch,
        )
        member.tell()
        done = member.known().keys() | dict(summary.failed)
        reasons = member.reasons() | dict(summary.not_reached)
    summary.not_reached = [
        (bucket, reasons.get(bucket, "the budget was used up"))
        for bucket in buckets
        if bucket not in done
    ]
    return summary


class _Member:
    """This machine in the fleet."""

    def __init__(
        self,
        study: FleetStudy,
        store: Store,
        device: Device,
        versions: Versions,
        buckets: Sequence[Bucket],
        note: Callable[[str], None],
    ) -> None:
        self.study, self.store, self.device, self.versions = study, store, device, versions
        self.buckets, self.note = buckets, note
        self.fetched = 0
        self.refused: dict[Bucket, str] = {}

    def known(self) -> dict[Bucket, Row]:
        """Winners that count here, by bucket."""
        versions = vars(self.versions).values()
        return {row.bucket: row for row in self.store.tuned(self.device, *versions)}

    def tell(self) -> None:
        """Note what was fetched since the last time."""
        if self.fetched:
            self.note(f"Tuned by other machines, and fetched: {self.fetched}.")
        self.fetched = 0

    def exchange(self) -> list[Attempt]:
        """Fetch what the fleet has, and give it what it lacks and is known here; all attempts."""
        attempts = self.study.attempts()
        self._fetch(attempts)
        held, known = {each.bucket for each in attempts if each.holds}, self.known()
        for bucket in self.buckets:
            result = bucket in known and bucket not in held and self._result(known[bucket])
            attempt = self.study.claim(bucket) if result else None
            if result and attempt is not None:
                self.study.finish(attempt, result["speedup"], result)
        return attempts

    def dispatch(self, wanted: Sequence[Bucket], work: Work, left: Clock) -> None:
        """Take and tune buckets as long as there are any, then wait for those of others."""
        tried: set[Bucket] = set()
        waiting = False
        while left() > 0:
            attempts = self.exchange()
            taken = {each.bucket for each in attempts if each.holds} | set(_given_up(attempts))
            free = [bucket for bucket in wanted if bucket not in taken and bucket not in tried]
            others = [each for each in attempts if each.state == "running"]
            if free:
                if self._take(free[0], work):
                    tried.add(free[0])
            elif any(each.bucket in wanted for each in others):
                if not waiting:
                    self.note(f"Nothing is left to take: waiting for {_names(others)}.")
                waiting = True
                time.sleep(POLL_S)
            else:
                return
        self.exchange()

    def reasons(self) -> dict[Bucket, str]:
        """Why buckets have no winner here, as far as the fleet is the cause."""
        attempts = self.study.attempts()
        running = {
            each.bucket: f"{each.machine} is at it" for each in attempts if each.state == "running"
        }
        return _given_up(attempts) | running | self.refused

    def _take(self, bucket: Bucket, work: Work) -> bool:
        """Tune a bucket; False where another machine was faster."""
        attempt = self.study.claim(bucket)
        if attempt is None:
            return False
        with self.study.beating(attempt):
            outcome = work(bucket)
            result = None if isinstance(outcome, BucketSkipped) else self._result(outcome.row)
            if result:
                self.study.finish(attempt, result["speedup"], result)
            elif isinstance(outcome, BucketSkipped) and outcome.failed:
                self.study.fail(attempt, outcome.reason)
            else:
                self.study.give_back(attempt)
        return True

    # --- evidence ----------------------------------------------------------------------------

    def _result(self, row: Row) -> dict[str, Any] | None:
        """A winner's run and evidence, as another machine's `_store_result` takes it; None for one
        of an unknown system, or that no single run here has decided.
        """
        rows = [
            each
            for each in self.store.evidence(row.bucket)
            if each["device"] == self.device.key and each["stage"] in STAGES
            if (each["kernel"], each["mlx"], each["system"]) == (row.kernel, row.mlx, row.system)
        ]
        last = max((each["run"] for each in rows if each["stage"] == "duel"), default=None)
        evidence = [
            {name: value for name, value in each.items() if name not in OF_RUN}
            for each in rows
            if each["run"] == last
        ]
        search, duel = (_measurements(row.bucket, evidence, stage) for stage in STAGES)
        if row.system != self.versions.system or not verdict(duel, search):
            return None
        (run,) = [each for each in self.store.runs()[self.device] if each["id"] == last]
        return {
            "speedup": row.speedup,
            "nonce": self._nonce(run),
            "started": run["started"],
            "at": evidence[-1]["at"],
            **{name: json.loads(run[name]) for name in ("software", "options", "conditions")},
            "evidence": evidence,
        }

    def _nonce(self, run: Mapping[str, Any]) -> str:
        """What tells a run from all others, on every machine."""
        with closing(open_read_only(self.store.path)) as connection:
            return nonce(connection, run)

    def _fetch(self, attempts: Iterable[Attempt]) -> None:
        """Store the winners of others that are not known here."""
        known = self.known()
        new = [
            each
            for each in attempts
            if each.state == "done" and each.bucket not in known and each.bucket not in self.refused
        ]
        if not new:
            return
        runs = {imported_nonce(run): run["id"] for run in self.store.runs().get(self.device, [])}
        for each in new:
            try:
                self._store_result(each, runs)
                self.fetched += 1
            except (ValueError, TypeError, LookupError, AttributeError, StoreError) as error:
                if isinstance(error, StoreError) and not isinstance(error.__cause__, ValueError):
                    raise  # not the data's fault
                cause = one_line(error)
                self.refused[each.bucket] = (
                    f"what {each.machine} found is not used: {cause}; "
                    "without --storage it is tuned here"
                )

    def _store_result(self, attempt: Attempt, runs: dict[str, int]) -> None:
        """Store one result, in the run here that stands for the run there.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it is malformed, or did not hold
                here.
        """
        result, bucket = attempt.result, attempt.bucket
        search, duel = (_measurements(bucket, result["evidence"], stage) for stage in STAGES)
        if not verdict(duel, search):
            raise ValueError("it decides nothing")
        source, here = str(result["nonce"]), {each["run"] for each in self.store.evidence(bucket)}
        ours = [run for run in self.store.runs().get(self.device, []) if run["id"] in here]
        if not re.fullmatch("[0-9a-f]{16}", source):
            raise ValueError("it names no run")
        if source in map(self._nonce, ours):
            raise ValueError("it did not hold here")
        if source not in runs:
            software = {str(name): str(value) for name, value in result["software"].items()}
            runs[source] = self.store.start_run(
                self.device,
                kernel=self.versions.kernel,
                software={**software, "mlx": self.versions.mlx, "system": self.versions.system},
                options=dict(result["options"]),
                conditions={**result["conditions"], "nonce": source},
                started=_time(result["started"]),
            )
        self.store.record(runs[source], bucket, search, duel, at=_time(result["at"]))


def _measurements(
    bucket: Bucket, evidence: Iterable[Mapping[str, Any]], stage: str
) -> list[Measurement]:
    """One stage of a bucket's evidence. Raises what malformed data raises."""
    return [
        replace(measurement_of({**row, **bucket._asdict()}), executed=_executed(row["executed"]))
        for row in evidence
        if row["stage"] == stage
    ]


def _executed(text: str | None) -> Plan | None:
    """The plan that was written as its text. Raises ValueError: it is none."""
    if text is None:
        return None
    found = re.fullmatch(r"(\w+)(?: x(\d+))?(?: (\w+))?", text)
    if not found:
        raise ValueError(f"expected column executed as a plan; got {text!r}")
    return Plan(found[1], int(found[2] or 1), found[3] or "")


def _time(text: object) -> str:
    """An ISO time. Raises ValueError: it is none."""
    return datetime.fromisoformat(str(text)).isoformat()


def _given_up(attempts: Iterable[Attempt]) -> dict[Bucket, str]:
    """Buckets that nobody needs to try again, with the reason: they failed, or machines died."""
    failed = {
        each.bucket: f"failed on {each.machine}: {each.reason}"
        for each in attempts
        if each.state == "failed"
    }
    dead = [each.bucket for each in attempts if each.state == "dead"]
    return {
        bucket: f"{LIVES} machines died at it" for bucket in dead if dead.count(bucket) >= LIVES
    } | failed


def _names(attempts: Iterable[Attempt]) -> str:
    return ", ".join(sorted({each.machine for each in attempts}))
