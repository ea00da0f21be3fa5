"""Two tables of a family as one, what differs between them, and one without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import ShareError
from .shapes import Bucket
from .share_format import (
    VERSION,
    SharedBucket,
    SharedDevice,
    SharedEntry,
    SharedRun,
    SharedTable,
    settled,
)
from .words import counted


def merged(a: SharedTable, b: SharedTable) -> SharedTable:
    """The union of two tables' evidence and what follows from it.

    It is associative, commutative and idempotent: every device, run and entry of a bucket is known
    by its versions, id or run. Where two with the same name differ, which no run of the tuner
    makes, the one with more rounds is taken, then the one whose text comes first.

    Raises:
        ShareError: they are of different families.
    """
    if a.family != b.family:
        raise ShareError(f"{a.family} and {b.family} are different families: they don't merge")
    same: dict[tuple[str, ...], list[SharedDevice]] = {}
    for device in (*a.devices, *b.devices):
        same.setdefault(device.versions, []).append(device)
    devices = (_joined(found) for _, found in sorted(same.items()))
    return SharedTable.model_construct(
        version=VERSION, family=a.family, devices=tuple(filter(None, devices))
    )


def _joined(devices: Iterable[SharedDevice]) -> SharedDevice | None:
    """One device of several with the same versions."""
    devices = tuple(devices)
    facts = min((device.facts for device in devices), key=_text)
    runs: dict[str, SharedRun] = {}
    evidence: dict[Bucket, dict[str, SharedEntry]] = {}
    for device in devices:
        for run in device.runs:
            runs[run.id] = min(runs.get(run.id, run), run, key=lambda each: _text(vars(each)))
        for bucket in device.buckets:
            there = evidence.setdefault(bucket.bucket, {})
            for entry in bucket.evidence:
                there[entry.run] = min(there.get(entry.run, entry), entry, key=_entry_order)
    return settled(facts, runs.values(), {b: found.values() for b, found in evidence.items()})


def _entry_order(entry: SharedEntry) -> tuple[int, str]:
    return -len(entry.baseline_samples_us), entry.model_dump_json()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


# --- differences ---------------------------------------------------------------------------------


def differences(a: SharedTable, b: SharedTable) -> dict[str, list[dict[str, Any]]]:
    """What is in one table alone, and which buckets have another winner.

    Returns lists of `only_a`, `only_b` (buckets; `a` and `b` are their winners as text) and
    `changed` (also those whose speed-up or evidence alone differs: `same_plan`), each with the
    device's key, kernel, MLX and system.
    """
    found: dict[str, list[dict[str, Any]]] = {"only_a": [], "only_b": [], "changed": []}
    left, right = _by_bucket(a), _by_bucket(b)
    for place in sorted({**left, **right}):
        versions, bucket = place
        one, other = left.get(place), right.get(place)
        if one == other:
            continue
        told = {
            **dict(zip(("device", "kernel", "mlx", "system"), versions, strict=True)),
            **bucket._asdict(),
            "a": one and _winner(one),
            "b": other and _winner(other),
        }
        if one and other:
            found["changed"].append({**told, "same_plan": one.plan == other.plan})
        else:
            found["only_a" if one else "only_b"].append(told)
    return found


def _by_bucket(table: SharedTable) -> dict[tuple[tuple[str, ...], Bucket], SharedBucket]:
    return {
        (device.versions, bucket.bucket): bucket
        for device in table.devices
        for bucket in device.buckets
    }


def _winner(bucket: SharedBucket) -> str:
    span = ""
    if bucket.speedup_low is not None and bucket.speedup_high is not None:
        span = f" {bucket.speedup:.3g}x [{bucket.speedup_low:.3g}, {bucket.speedup_high:.3g}]"
    return f"{bucket.plan}{span} of {counted(len(bucket.evidence), 'run')}"


def described(found: Mapping[str, list[dict[str, Any]]], names: tuple[str, str]) -> Iterator[str]:
    """The same as lines; `names` are the two files'."""
    for each in found["changed"]:
        what = "evidence" if each["same_plan"] else "plan"
        yield f"{what}: {_place(each)}: {each['a']} -> {each['b']}"
    for side, name in zip(("a", "b"), names, strict=True):
        for each in found[f"only_{side}"]:
            yield f"only in {name}: {_place(each)}: {each[side]}"
    if not any(found.values()):
        yield "no difference"


def _place(each: Mapping[str, Any]) -> str:
    bucket = Bucket(*(each[name] for name in Bucket._fields))
    return f"{each['device']} (MLX {each['mlx']}) {bucket}"
