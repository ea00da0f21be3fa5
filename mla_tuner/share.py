"""Tables that devices of a chip family share: written from the database, checked before use.

One JSON file a family, one line a bucket, so that a person can review what changed. Whoever serves
reads such a file with the standard library; only this module and `models` know pydantic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .backends import cuda_tiles, metal_tiles
from .candidates import MIN_GAIN
from .device import Device
from .errors import ShareError
from .evidence import MIN_ROUNDS
from .plan import Plan
from .shapes import Bucket, pieces
from .store import Store
from .table import BASELINES, BUCKET_COLUMNS, Row

SCHEMA_NAME = "schema.json"
_DIGITS = 4  # of a time or a speed-up: more is noise
_SOFTWARE = ("mla_tuner", "mlx", "driver", "os", "python", "optuna")
_OPTIONS = ("budget_s", "buckets", "command", "force", "seed")
# What could tell whose machine it was.
_PRIVATE = re.compile(r"(^|[\s\"'=])(~|/|[A-Za-z]:\\)|/(home|root|Users|tmp|mnt|work)\b|\\|@")

Text = Annotated[str, Field(max_length=200)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


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


class SharedBucket(SharedKind):
    """A bucket's winner. Times of one call in microseconds; speed-ups are time(baseline) /
    time(plan), the baseline being `mlx` or, where that can't run, another of MLX's paths.

    speedup_low and speedup_high: the 95 % interval of the final duel, of as many rounds; null where
    the baseline won without a rival. single_speedup, split_speedup: of the best plan of that path.
    """

    context: Count
    path: Text
    partitions: Count
    tile: Text
    median_us: Amount
    baseline: Text
    baseline_us: Amount
    speedup: Amount
    speedup_low: Amount | None
    speedup_high: Amount | None
    rounds: Count
    single_speedup: Amount | None
    split_speedup: Amount | None
    day: Day

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
    """One run of the tuner: when, by which clock, with what software, and how it was asked."""

    day: Day
    clock: Literal["gpu", "wall"]
    software: dict[Text, Text]
    options: dict[Text, str | bool | int | float]


class SharedDevice(_Strict):
    """One device with one kernel, MLX and system (OS and driver)."""

    key: Text
    backend: Literal["cpu", "cuda", "metal"]
    architecture: Text
    name: Text
    cores: Count | None
    memory_gb: Count
    cache_bytes: Annotated[int, Field(ge=0)]
    kernel: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    mlx: Annotated[str, Field(min_length=1, max_length=40)]
    system: Annotated[str, Field(min_length=1, max_length=200)]
    runs: Annotated[tuple[SharedRun, ...], Field(min_length=1, strict=False)]
    buckets: Annotated[tuple[SharedBucket, ...], Field(min_length=1, strict=False)]
    thresholds: Annotated[tuple[SharedThreshold, ...], Field(strict=False)]


class SharedTable(_Strict):
    """All that is known of a chip family; the name of the file is the family's."""

    version: Literal[1]
    family: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=80)]
    devices: Annotated[tuple[SharedDevice, ...], Field(min_length=1, strict=False)]


# --- export --------------------------------------------------------------------------------------


def export(store: Store, folder: Path) -> list[Path]:
    """Write a file for each family in the database, and the schema beside them; the paths.

    Of each device the winners of the versions that it was tuned with last.

    Raises:
        ShareError: there is nothing to write, or it can't be written, or it would not pass `check`.
    """
    families: dict[str, list[SharedDevice]] = {}
    for device, runs in store.runs().items():
        shared = _device(store, device, runs[-1], runs)
        if shared:
            families.setdefault(device.family, []).append(shared)
    if not families:
        raise ShareError(f"{store.path} holds no winners: run mla-tune")
    written = []
    for family, devices in sorted(families.items()):
        table = SharedTable(version=1, family=family, devices=tuple(devices))
        path = folder / f"{family}.json"
        problems = faults(text := render(table), path)
        if problems:
            raise ShareError(problems[0])
        written.append(_write(path, text))
    _write(folder / SCHEMA_NAME, schema())
    return written


def _device(
    store: Store, device: Device, last: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> SharedDevice | None:
    """The winners of a device with the versions of its last run; None without any."""
    versions = {name: last[name] for name in ("kernel", "mlx", "system")}
    rows = [row for row in store.plans(device.key) if versions.items() <= row._asdict().items()]
    buckets = [bucket for row in rows if (bucket := _bucket(store, device, row))]
    if not buckets:
        return None
    timed = {found["run"] for found in store.evidence()}
    same = [run for run in runs if versions.items() <= run.items() and run["id"] in timed]
    kinds = store.thresholds(device.key, **versions)
    return SharedDevice(
        **{name: getattr(device, name) for name in ("key", "backend", "architecture", "name")},
        **{name: getattr(device, name) for name in ("cores", "memory_gb", "cache_bytes")},
        **versions,
        runs=tuple(_run(run, device) for run in same),
        buckets=tuple(sorted(buckets, key=lambda each: each.bucket)),
        thresholds=tuple(sorted(map(_threshold, kinds), key=_kind)),
    )


def _bucket(store: Store, device: Device, row: Row) -> SharedBucket | None:
    """A winner with its last duel; None for one that stands for a plan that was refuted."""
    if row.stage == "refute":
        return None
    versions = (device.key, row.kernel, row.mlx, row.system)
    duel = {
        Plan(found["path"], found["partitions"], found["tile"]): found
        for found in store.evidence(row.bucket)
        if found["stage"] == "duel" and found["status"] == "ok"
        if tuple(found[name] for name in ("device", "kernel", "mlx", "system")) == versions
    }
    values = {name: value for name, value in row._asdict().items() if name in _BUCKET_NUMBERS}
    return SharedBucket(
        **row.bucket._asdict(),
        **vars(row.plan),
        **{name: _rounded(value) for name, value in values.items()},
        baseline=row.baseline,
        baseline_us=_rounded(duel[Plan(row.baseline)]["median_us"]),
        rounds=duel[row.plan]["rounds"],
        day=row.day,
    )


_BUCKET_NUMBERS = (
    *("median_us", "speedup", "speedup_low", "speedup_high"),
    *("single_speedup", "split_speedup"),
)


def _run(run: Mapping[str, Any], device: Device) -> SharedRun:
    """A run that timed something. Raises ShareError: nobody knows by which clock."""
    software, options = json.loads(run["software"]), json.loads(run["options"])
    known, day = json.loads(run["conditions"]), run["started"][:10]
    if device.backend == "cuda" and "clock" not in known:
        raise ShareError(
            f"the run of {day} on {device.key} does not say by which clock it timed: "
            "tune into another database (--db)"
        )
    return SharedRun(
        day=day,
        clock=known.get("clock", "wall"),  # elsewhere there is no other
        software={name: str(software[name]) for name in _SOFTWARE if name in software},
        options={name: options[name] for name in _OPTIONS if name in options},
    )


def _threshold(row: Mapping[str, Any]) -> SharedThreshold:
    return SharedThreshold(
        **{name: row[name] for name in SharedThreshold.model_fields if name != "kappa"},
        kappa=_rounded(row["kappa"]),
    )


def _rounded(value: float | None) -> Any:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _kind(each: SharedThreshold) -> tuple[object, ...]:
    return tuple(getattr(each, name) for name in SharedKind.model_fields)


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShareError(f"cannot write {path}: {error.strerror}") from error
    return path


# --- text ----------------------------------------------------------------------------------------


def render(table: SharedTable) -> str:
    """The one text of a table: what differs in a file differs in it."""
    devices = sorted(table.devices, key=lambda each: (each.key, each.kernel, each.mlx, each.system))
    body = ",\n".join(_rendered(device) for device in devices)
    head = f'"version": {table.version},\n"family": {json.dumps(table.family)},'
    return f'{{\n{head}\n"devices": [\n{body}\n]\n}}\n'


def _rendered(device: SharedDevice) -> str:
    """A line a fact, and a line each run, bucket and threshold."""
    lines = []
    for name, value in device.model_dump().items():
        if isinstance(value, tuple):
            entries = ",\n".join(f"   {_line(entry)}" for entry in value)
            lines.append(f'"{name}": [\n{entries}\n  ]' if entries else f'"{name}": []')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return " {\n  " + ",\n  ".join(lines) + "\n }"


def _line(entry: Mapping[str, object]) -> str:
    """A bucket begins with its context; names of software and options are sorted."""
    first = {name: entry[name] for name in ("context",) if name in entry}
    rest = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in entry.items()
    }
    return json.dumps({**first, **rest})


def schema() -> str:
    """The JSON Schema of a file, as it lies beside them."""
    return json.dumps(SharedTable.model_json_schema(), indent=1, sort_keys=True) + "\n"


# --- check ---------------------------------------------------------------------------------------


def check(path: Path) -> list[str]:
    """What is wrong with a file, a line each that names it; empty: it can be relied on."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return [f"{path.name}: {error.strerror}"]
    except ValueError:
        return [f"{path.name}: not UTF-8 text"]
    return faults(text, path)


def faults(text: str, path: Path) -> list[str]:
    """The same of a text that is to lie at `path`."""
    try:
        table = SharedTable.model_validate(json.loads(text))
    except ValidationError as error:
        return [f"{path.name}: {_where(each)}: {each['msg']}" for each in error.errors()]
    except (ValueError, RecursionError) as error:
        return [f"{path.name}: not JSON: {error}"]
    found = list(_table_faults(table, path))
    if not found and text != render(table):
        found = [
            f"order or layout is not that of `mla-tune share export`: {_first_change(text, table)}"
        ]
    return [f"{path.name}: {fault}" for fault in found]


def _where(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "the file"


def _first_change(text: str, table: SharedTable) -> str:
    have, want = text.splitlines(), render(table).splitlines()
    pairs = zip([*have, ""], [*want, ""], strict=False)
    line = next((at for at, (a, b) in enumerate(pairs, 1) if a != b), len(have))
    return f"line {line}"


def _table_faults(table: SharedTable, path: Path) -> Iterable[str]:
    if path.stem != table.family:
        yield f"expected the family's name, {table.family}.json"
    for text in _texts(table.model_dump()):
        if _PRIVATE.search(text) or not text.isprintable():
            yield f"a path, an address or what can't be printed: {text!r}"
    seen: set[tuple[str, ...]] = set()
    for device in table.devices:
        versions = (device.key, device.kernel, device.mlx, device.system)
        if versions in seen:
            yield f"{device.key} is there twice with the same versions"
        seen.add(versions)
        yield from (f"{device.key}: {fault}" for fault in _device_faults(device, table.family))


def _device_faults(shared: SharedDevice, family: str) -> Iterable[str]:
    device = Device(
        *(shared.backend, shared.architecture, family, shared.cores),
        *(shared.memory_gb, shared.name, shared.cache_bytes),
    )
    if device.key != shared.key:
        yield f"expected the key {device.key}"
    for run in shared.runs:
        missing = [name for name in ("mla_tuner", "mlx", "os") if not run.software.get(name)]
        if missing or not run.options:
            yield f"the run of {run.day} lacks {', '.join(missing) or 'its options'}"
    days = [run.day for run in shared.runs]
    ordered = sorted({each.bucket for each in shared.buckets})
    if [each.bucket for each in shared.buckets] != ordered:
        yield "buckets are not in order, or one is there twice"
    if [_kind(each) for each in shared.thresholds] != sorted({*map(_kind, shared.thresholds)}):
        yield "thresholds are not in order, or one is there twice"
    for each in shared.buckets:
        fault = _bucket_fault(each, device) or _day_fault(each.day, min(days))
        if fault:
            yield f"context {each.context} batch {each.batch} heads {each.heads}: {fault}"


def _bucket_fault(each: SharedBucket, device: Device) -> str | None:
    """Why a winner can't be one; None if it may."""
    try:
        shape, plan = each.bucket.shape, each.plan
    except ValueError as error:
        return str(error)
    if shape.bucket != each.bucket:
        return f"no bucket: it is rounded to {shape.bucket}"
    if pieces(each.context, plan.partitions) != plan.partitions:
        return f"{plan} makes only {pieces(each.context, plan.partitions)} pieces"
    if each.baseline not in BASELINES:
        return f"{each.baseline!r} is none of MLX's paths"
    stays = plan.path == each.baseline
    if each.rounds < MIN_ROUNDS and not stays:
        return f"{each.rounds} rounds are too few for an interval"
    low, high = each.speedup_low, each.speedup_high
    if stays:
        return None if each.speedup == 1 else f"{plan} is not faster than itself"
    if low is None or high is None or not low <= each.speedup <= high:
        return "the speed-up lies outside of its interval"
    if low < MIN_GAIN:  # it was rounded
        return f"the interval begins at {low:g}: it must clear {MIN_GAIN:g}"
    return _tile_fault(plan, each.bucket, device) if plan.native else None


def _tile_fault(plan: Plan, bucket: Bucket, device: Device) -> str | None:
    if device.backend == "cuda":
        capability = cuda_tiles.capability(device.architecture)
        return cuda_tiles.refusal(plan.tile, bucket.shape, capability)
    if device.backend == "metal":
        return metal_tiles.refusal(plan.tile, bucket.shape)
    return None if re.fullmatch(r"r[1-9]\d{0,2}", plan.tile) else f"{plan.tile!r} is no tile"


def _day_fault(day: str, first: str) -> str | None:
    try:
        known = date.fromisoformat(day) >= date.fromisoformat(first)
    except ValueError:
        return f"{day} is no day"
    return None if known else f"it was measured on {day}, before the first run"


def _texts(value: object) -> Iterable[str]:
    """Every text in a value of JSON, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
