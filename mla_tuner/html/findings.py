"""What is known of one device: from its tuning database, or from a shared table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ..device import Device, probe
from ..errors import StoreError
from ..evidence import Measurement, median_interval, percentile, refuted, verdict
from ..plan import Plan
from ..records import expect, measurement_of
from ..shapes import Bucket, Shape
from ..share import read
from ..share_format import SharedBucket, SharedDevice
from ..share_pool import Entry
from ..store import Store
from ..table import BUCKET_COLUMNS, ROW_COLUMNS, Row, checked_row

VERSIONS = ("kernel", "mlx", "system")
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A bucket: its stored winner, the sentence that says why, and what was measured, oldest first.

    `row` is None where the evidence decides nothing. `measured` has (stage, measurement).
    """

    bucket: Bucket
    row: Row | None
    reason: str = ""
    measured: tuple[tuple[str, Measurement], ...] = ()


@dataclass(frozen=True)
class Findings:
    """All of a device with one kernel, MLX and system; buckets in their order.

    `source` is `database` or `table`: the latter has the duels, not what was searched.
    `runs` have `day` and any of `clock`, `software`, `options`, `conditions`. `left_out` counts
    winners of other versions. `others` are the keys of the devices there that were not chosen.
    """

    source: str
    device: Device
    versions: Mapping[str, str]
    runs: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    thresholds: Sequence[Mapping[str, Any]]
    left_out: int = 0
    others: Sequence[str] = ()

    @property
    def measurements(self) -> int:
        return sum(len(each.measured) for each in self.findings)


# --- a database ----------------------------------------------------------------------------------


def of_store(store: Store, key: str | None = None) -> Findings:
    """Of a device in a database, with the versions that were timed last.

    key: which device; None for the only one, else for the one that this machine is.

    Raises:
        StoreError: there is no such device, or nothing was measured on it, or a row is malformed.
    """
    runs, evidence = store.runs(), store.evidence()
    timed = {row["device"] for row in evidence}
    known = {each.key: each for each in runs if each.key in timed or each.key == key}
    device = _chosen(known or {each.key: each for each in runs}, key, store.path)
    try:
        expect(vars(device), ("backend", "architecture", "family", "name"), str)
        expect(vars(device), ("memory_gb", "cache_bytes"), int)
        of_device = [row for row in evidence if row["device"] == device.key]
        found = _of_device(store, device, runs[device], of_device)
        return replace(found, others=[each for each in known if each != device.key])
    except (ValueError, RecursionError) as error:
        raise StoreError(f"malformed data in {store.path} ({error})") from error


def _of_device(
    store: Store,
    device: Device,
    runs: Sequence[Mapping[str, Any]],
    evidence: Sequence[Mapping[str, Any]],
) -> Findings:
    timed = {row["run"] for row in evidence}
    known = [run for run in runs if run["id"] in timed]
    if not known:
        raise StoreError(f"{store.path} holds no measurement of {device.key}: run mla-tune")
    versions = {name: known[-1][name] for name in VERSIONS}
    expect(versions, VERSIONS, str)
    same = [run for run in known if versions.items() <= run.items()]
    found = _grouped(row for row in evidence if versions.items() <= row.items())
    rows = store.plans(device.key)
    winners = {row.bucket: row for row in rows if versions.items() <= row._asdict().items()}
    return Findings(
        *("database", device, versions, [_run(run) for run in same]),
        [_finding(bucket, winners.get(bucket), found[bucket]) for bucket in sorted(found)],
        store.thresholds(device.key, **versions),
        left_out=len(rows) - len(winners),
    )


_Pairs = list[tuple[Mapping[str, Any], Measurement]]


def _grouped(rows: Iterable[Mapping[str, Any]]) -> dict[Bucket, _Pairs]:
    """Rows of evidence with what they say, by bucket."""
    found: dict[Bucket, _Pairs] = {}
    for row in rows:
        measurement = measurement_of(row)
        found.setdefault(Bucket(*(row[name] for name in BUCKET_COLUMNS)), []).append(
            (row, measurement)
        )
    return found


def _finding(bucket: Bucket, row: Row | None, pairs: _Pairs) -> Finding:
    measured = tuple((str(raw["stage"]), measurement) for raw, measurement in pairs)
    verdicts = _verdicts(pairs) if row else []
    reason = next((why for plan, why in verdicts if row and plan == row.plan), "")
    return Finding(bucket, row, reason, measured)


def _verdicts(pairs: _Pairs) -> list[tuple[Plan, str]]:
    """Winner and reason of each run that decided, the last run first."""
    runs: dict[int, _Pairs] = {}
    for raw, measurement in pairs:
        if raw["stage"] != "cut":
            runs.setdefault(raw["run"], []).append((raw, measurement))
    found = []
    for of_run in reversed(runs.values()):
        stage = of_run[-1][0]["stage"]  # a duel comes after its search
        duel = [m for raw, m in of_run if raw["stage"] == stage]
        decided = None
        if stage == "duel":
            decided = verdict(duel, [m for _, m in of_run])
        elif stage == "refute":
            decided = refuted(duel)
        if decided:
            found.append((decided[0].plan, decided[2]))
    return found


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as a shared table has it, and its conditions."""
    expect(run, ("started", "software", "options", "conditions"), str)
    parts = {name: json.loads(run[name]) for name in ("software", "options", "conditions")}
    for name, value in parts.items():
        if not isinstance(value, dict):
            raise ValueError(f"run {run['id']}: expected column {name} as a JSON object")
    clock = {name: value for name, value in parts["conditions"].items() if name == "clock"}
    expect(clock, list(clock), str)
    return {"day": run["started"][:10], **clock, **parts}


# --- a shared table ------------------------------------------------------------------------------


def of_table(path: Path, key: str | None = None) -> Findings:
    """Of a device in a shared table, `tuning_db/<family>.json`, with its latest versions.

    key: which device; None for the only one, else for the one that this machine is.

    Raises:
        ShareError: the table can't be relied on, see `mla-tune share check`.
        StoreError: there is no such device.
    """
    table = read(path)
    entries = sorted(table.devices, key=lambda each: max(run.day for run in each.runs))
    known = {each.key: each for each in entries}
    shared = _chosen(known, key, path)
    device = Device(
        *(shared.backend, shared.architecture, table.family, shared.cores),
        *(shared.memory_gb, shared.name, shared.cache_bytes),
    )
    others = [each for each in entries if each.key == shared.key and each is not shared]
    return Findings(
        *("table", device, {name: getattr(shared, name) for name in VERSIONS}),
        [run.model_dump(include={"day", "clock", "software", "options"}) for run in shared.runs],
        [_shared(each, shared) for each in shared.buckets],
        [each.model_dump() for each in shared.thresholds],
        left_out=sum(len(each.buckets) for each in others),
        others=[each for each in known if each != shared.key],
    )


def _shared(each: SharedBucket, device: SharedDevice) -> Finding:
    """A winner and the duels behind it, a run each."""
    versions = {name: getattr(device, name) for name in VERSIONS}
    values = each.model_dump() | versions | {"stage": "duel"}
    row = checked_row([values[name] for name in ROW_COLUMNS])
    duels = [m for shared in each.evidence for m in _duel(each.bucket.shape, shared.entry)]
    return Finding(row.bucket, row, "", tuple(("duel", measurement) for measurement in duels))


def _duel(shape: Shape, entry: Entry) -> Iterator[Measurement]:
    """What a run measured. Of the best plan of another path it tells the speed-up alone."""
    base, base_us = Plan(entry.baseline), entry.baseline_samples_us
    if base_us:
        yield replace(_timed(shape, base, base_us), ratio=1.0)
        for plan, ratio in entry.best:
            if plan.path != entry.plan.path:
                yield Measurement(shape, plan, median_us=median(base_us) / ratio, ratio=ratio)
    if entry.samples_us:
        low, high = median_interval(entry.ratios) or (None, None)
        timed = _timed(shape, entry.plan, entry.samples_us)
        yield replace(timed, ratio=median(entry.ratios), ratio_low=low, ratio_high=high)
    elif entry.failed:
        yield Measurement(shape, entry.plan, entry.failed, "failed in its duel")


def _timed(shape: Shape, plan: Plan, times: Sequence[float]) -> Measurement:
    spread = (percentile(times, 0.1), percentile(times, 0.9))
    return Measurement(shape, plan, "ok", "", None, len(times), median(times), *spread)


def _chosen(found: Mapping[str, T], key: str | None, path: Path) -> T:
    """The device that was asked for, or the only one, or this machine's among several."""
    if key is None and len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise StoreError(f"{path} holds no measurement: run mla-tune")
    chosen = probe().key if key is None else key
    if chosen in found:
        return found[chosen]
    problem = f"{path} has no {chosen}"
    if key is None:
        problem = f"{path} has {len(found)} devices, and MLX's here, {chosen}, is none of them"
    raise StoreError(f"{problem}: name one with --device: {', '.join(found)}")
