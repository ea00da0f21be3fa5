"""The format of shared tables: the model, its one text, and reading it back.

One JSON file a family. A bucket is a line and each of its entries is one below it, so that a person
can review what changed and `family` can read a table without parsing the evidence.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ShareError
from .family import NAME
from .fits import threshold
from .plan import Plan
from .shapes import Bucket
from .share_pool import Entry, Pooled, pool
from .table import BUCKET_COLUMNS

VERSION: Final = 2
_DIGITS = 4  # of a time or a speed-up: more is noise

Text = Annotated[str, Field(max_length=200)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
# Of time in microseconds, so that no speed-up that follows is beyond one of those.
Time = Annotated[float, Field(ge=1e-3, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=1e-12, le=1e12, allow_inf_nan=False)]
Option = (
    Text
    | bool
    | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    | Annotated[float, Field(allow_inf_nan=False)]
)
Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Samples = Annotated[tuple[Time, ...], Field(strict=False, max_length=4096)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SharedKind(_Strict):
    """What buckets have in common that differ in context alone."""

    batch: Count
    heads: Count
    dtype: Text
    kv_lora_rank: Count
    rope_dim: Annotated[int, Field(ge=0, le=1 << 20)]
    q_len: Count
    layout: Text


class SharedBest(_Strict):
    """The best plan of a native path that a run measured, and its speed-up over the baseline."""

    path: Literal["single", "split"]
    partitions: Count
    tile: Text
    speedup: Amount


class SharedEntry(_Strict):
    """What one run found in a bucket: its final duel, with the times of each round in microseconds.

    Without samples the plan failed, or is the baseline itself, which nothing came close to.
    Without times of the baseline nothing but the failure is known.
    """

    run: Digest
    path: Text
    partitions: Count
    tile: Text
    failed: Literal["", "wrong", "error"]
    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    samples_us: Samples
    baseline: Literal["mlx", "mlx_rows", "mlx_fused"]
    baseline_samples_us: Samples
    best: Annotated[tuple[SharedBest, ...], Field(strict=False, max_length=2)]
    day: Day

    @model_validator(mode="after")
    def _times_are_paired(self) -> SharedEntry:
        if self.samples_us and not self.baseline_samples_us:
            raise ValueError("samples_us without baseline_samples_us can't be compared")
        if self.samples_us and (self.failed or self.path == self.baseline):
            raise ValueError("samples_us of a plan that failed, or of the baseline itself")
        return self

    @property
    def entry(self) -> Entry:
        """Raises ValueError: path, partitions and tile don't go together."""
        best = tuple((Plan(b.path, b.partitions, b.tile), b.speedup) for b in self.best)
        return Entry(
            run=self.run,
            plan=Plan(self.path, self.partitions, self.tile),
            failed=self.failed,
            max_error=self.max_error,
            samples_us=self.samples_us,
            baseline=self.baseline,
            baseline_samples_us=self.baseline_samples_us,
            best=best,
            day=self.day,
        )


class SharedBucket(SharedKind):
    """A bucket's winner, as `share_pool.pool` makes it of the evidence. Times of one call in
    microseconds; speed-ups are time(baseline) / time(plan), the baseline being `mlx` or, where that
    can't run, another of MLX's paths.

    speedup_low and speedup_high: the 95 % interval of the pairs of all runs, of as many rounds;
    null where the baseline stays. single_speedup, split_speedup: of the best plan of that path.
    """

    context: Count
    path: Text
    partitions: Count
    tile: Text
    median_us: Time
    baseline: Text
    baseline_us: Time
    speedup: Amount
    speedup_low: Amount | None
    speedup_high: Amount | None
    rounds: Count
    single_speedup: Amount | None
    split_speedup: Amount | None
    day: Day
    evidence: Annotated[tuple[SharedEntry, ...], Field(min_length=1, strict=False)]

    @property
    def bucket(self) -> Bucket:
        return Bucket(*(getattr(self, name) for name in BUCKET_COLUMNS))

    @property
    def plan(self) -> Plan:
        """Raises ValueError: the three don't go together."""
        return Plan(self.path, self.partitions, self.tile)


class SharedThreshold(SharedKind):
    """Contexts from which our kernel wins and from which splitting does; null: nowhere. kappa: the
    constant of the law of partitions that its split winners show.
    """

    native_from: Count | None
    split_from: Count | None
    kappa: Amount | None


class SharedRun(_Strict):
    """One run of the tuner: when, by which clock, with what software, and how it was asked.

    `id` is the digest of these, of the device and of `nonce`, which tells runs apart that agree in
    all of it.
    """

    id: Digest
    nonce: Digest
    day: Day
    clock: Literal["gpu", "wall"]
    software: dict[Text, Text]
    options: dict[Text, Option]


class SharedFacts(_Strict):
    """A device, and what it was measured with: one kernel, MLX and system."""

    key: Text
    backend: Literal["cpu", "cuda", "metal"]
    architecture: Text
    name: Text
    cores: Count | None
    memory_gb: Count
    cache_bytes: Annotated[int, Field(ge=0, le=1 << 40)]
    kernel: Digest
    mlx: Annotated[str, Field(min_length=1, max_length=40)]
    system: Annotated[str, Field(min_length=1, max_length=200)]

    @property
    def versions(self) -> tuple[str, str, str, str]:
        """Key, kernel, MLX and system: what evidence must agree in to be pooled."""
        return self.key, self.kernel, self.mlx, self.system


class SharedDevice(SharedFacts):
    """One device with one kernel, MLX and system (OS and driver)."""

    runs: Annotated[tuple[SharedRun, ...], Field(min_length=1, strict=False)]
    buckets: Annotated[tuple[SharedBucket, ...], Field(min_length=1, strict=False)]
    thresholds: Annotated[tuple[SharedThreshold, ...], Field(strict=False)]

    @property
    def facts(self) -> dict[str, Any]:
        """All but what the runs add: the fields before `runs`."""
        return {name: getattr(self, name) for name in SharedFacts.model_fields}


class SharedTable(_Strict):
    """All that is known of a chip family; the name of the file is the family's."""

    version: Literal[2]
    family: Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=80)]
    devices: Annotated[tuple[SharedDevice, ...], Field(min_length=1, strict=False)]


# --- what follows from the evidence --------------------------------------------------------------


def run_id(versions: Iterable[str], run: Mapping[str, Any]) -> str:
    """The digest that a run is known by; `versions` as `SharedDevice.versions`."""
    told = {name: run[name] for name in SharedRun.model_fields if name != "id"}
    text = json.dumps([list(versions), told], sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def settled(
    facts: Mapping[str, Any],
    runs: Iterable[SharedRun],
    evidence: Mapping[Bucket, Iterable[SharedEntry]],
) -> SharedDevice | None:
    """A device as its evidence makes it: winners, thresholds, all in order; None without evidence.

    Raises ValueError: an entry's plan is none.
    """
    told = {bucket: tuple(entries) for bucket, entries in sorted(evidence.items())}
    buckets = [
        _bucket(bucket, entries)
        for bucket, entries in told.items()
        if any(each.baseline_samples_us for each in entries)
    ]
    if not buckets:
        return None
    used = {entry.run for bucket in buckets for entry in bucket.evidence}
    return SharedDevice.model_construct(
        **facts,
        runs=tuple(sorted((run for run in runs if run.id in used), key=_run_order)),
        buckets=tuple(buckets),
        thresholds=thresholds(buckets, facts["cores"]),
    )


def _bucket(bucket: Bucket, entries: Iterable[SharedEntry]) -> SharedBucket:
    ordered = tuple(sorted(entries, key=lambda each: (each.day, each.run)))
    found = pool([each.entry for each in ordered])
    return SharedBucket.model_construct(
        **bucket._asdict(), **pooled_fields(found), evidence=ordered
    )


def pooled_fields(found: Pooled) -> dict[str, Any]:
    """A winner as a bucket's fields have it: four digits."""
    values = {**vars(found.plan), **found._asdict()}
    del values["plan"]
    return {name: rounded(v) if isinstance(v, float) else v for name, v in values.items()}


def thresholds(buckets: Iterable[SharedBucket], cores: int | None) -> tuple[SharedThreshold, ...]:
    """Those of all kinds among the buckets, in order."""
    kinds: dict[Bucket, list[SharedBucket]] = {}
    for each in buckets:
        kinds.setdefault(each.bucket._replace(context=0), []).append(each)
    return tuple(_threshold(kind, kinds[kind], cores) for kind in sorted(kinds))


def _threshold(kind: Bucket, buckets: list[SharedBucket], cores: int | None) -> SharedThreshold:
    plans = {each.bucket: each.plan for each in buckets}
    known = {each.bucket: (each.single_speedup, each.split_speedup) for each in buckets}
    found = threshold(plans, cores, known)
    fields = {name: value for name, value in kind._asdict().items() if name != "context"}
    return SharedThreshold(
        **fields,
        native_from=found.native_from,
        split_from=found.split_from,
        kappa=None if found.kappa is None else rounded(found.kappa),
    )


def rounded(value: float) -> float:
    """As many digits as mean something."""
    return float(f"{value:.{_DIGITS}g}")


def _run_order(run: SharedRun) -> tuple[str, str]:
    return run.day, run.id


# --- text ----------------------------------------------------------------------------------------


def render(table: SharedTable) -> str:
    """The one text of a table: what differs in a file differs in it."""
    devices = sorted(table.devices, key=lambda each: each.versions)
    body = ",\n".join(_device_text(device) for device in devices)
    head = f'"version": {table.version},\n"family": {json.dumps(table.family)},'
    return f'{{\n{head}\n"devices": [\n{body}\n]\n}}\n'


def _device_text(device: SharedDevice) -> str:
    """A line a fact, a line each run, bucket, entry and threshold."""
    lines = [f'"{name}": {json.dumps(value)}' for name, value in device.facts.items()]
    lines.append(_list("runs", (line(run.model_dump()) for run in device.runs)))
    lines.append(_list("buckets", map(_bucket_text, device.buckets)))
    lines.append(_list("thresholds", (line(each.model_dump()) for each in device.thresholds)))
    return " {\n  " + ",\n  ".join(lines) + "\n }"


def _list(name: str, entries: Iterable[str]) -> str:
    text = ",\n".join(f"   {entry}" for entry in entries)
    return f'"{name}": [\n{text}\n  ]' if text else f'"{name}": []'


def _bucket_text(bucket: SharedBucket) -> str:
    """It begins with the bucket's own fields, in the order of the columns: `family` needs that."""
    values = bucket.model_dump(exclude={"evidence"})
    ordered = {name: values.pop(name) for name in BUCKET_COLUMNS} | values
    entries = ",\n".join(f"    {line(entry.model_dump())}" for entry in bucket.evidence)
    return f'{json.dumps(ordered)[:-1]}, "evidence": [\n{entries}]}}'


def line(entry: Mapping[str, object]) -> str:
    """An entry on one line; names of software and options are sorted."""
    ordered = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in entry.items()
    }
    return json.dumps(ordered)


def parse(text: str) -> SharedTable:
    """The table in a text, its fields as the model wants them; what they say is not checked.

    Raises:
        ShareError: one line with the first field that is not as it must be.
    """
    try:
        data = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if type(version) is int and version != VERSION:
            cure = "that takes a newer mla-tuner" if version > VERSION else "export it again"
            raise ShareError(
                f"version: it is {reprlib.repr(version)}, this reads {VERSION}: {cure}"
            )
        return SharedTable.model_validate(data)
    except ValidationError as error:
        raise ShareError(problems(error)[0]) from error
    except (ValueError, RecursionError) as error:
        raise ShareError(f"not JSON: {error}") from error


def problems(error: ValidationError) -> list[str]:
    """What the model has against a table: the field, then what is wrong with it."""
    found = error.errors(include_url=False, include_input=False)
    return [_field(each["loc"]) + f": {each['msg']}" for each in found]


def _field(place: tuple[int | str, ...]) -> str:
    """Its name; in a hostile file that can be anything."""
    text = ".".join(map(str, place)) or "the file"
    return text if text.isprintable() and len(text) < 200 else ascii(text)[:200]


def schema() -> str:
    """The JSON Schema of a file, as it lies beside them."""
    return json.dumps(SharedTable.model_json_schema(), indent=1, sort_keys=True) + "\n"
