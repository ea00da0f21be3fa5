"""What other devices of this chip family were tuned to: the table that is installed with the
package, and what was imported into the database. Standard library only.

A table may hold tens of thousands of buckets and a server asks for few of them: a bucket's line is
found by its first fields, as they are written, and read and checked when it is asked for.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from . import fits
from .candidates import MIN_GAIN, NEARLY_AS_FULL, busy, law, row_groups
from .device import Device
from .fits import Speedups, Tuned
from .plan import Plan
from .shapes import CONTEXT_GRID, MAX_PARTITIONS, Bucket, pieces
from .table import ROW_COLUMNS, Row, checked_row, content, read_imported

_PACKAGE = Path(__file__).parent
FOLDERS = (_PACKAGE / "tuning_db", _PACKAGE.parent / "tuning_db")  # installed; in the source tree
VERSION = 2  # of the tables' format
MAX_BYTES = 64 << 20  # a bucket with one run's evidence takes 900 bytes
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*", re.ASCII)  # of a family
# What stands before a device's buckets and after them, before one of them, and after its kind.
_BUCKETS, _END = b'\n  "buckets": [', b'\n  ],\n  "thresholds": ['
_BUCKET, _PATH, _EVIDENCE = b'\n   {"context": ', b', "path": ', b', "evidence": ['
# All names of a device's buckets, a line each: see `name_of`.
_NAMES = re.compile(
    rb'(?:\d{1,12}, "batch": \d{1,12}, "heads": \d{1,12}, "dtype": "\w{1,20}", '
    rb'"kv_lora_rank": \d{1,12}, "rope_dim": \d{1,12}, "q_len": \d{1,12}, "layout": "\w{1,20}"\n)*'
)
_LAYOUT = "its layout is not that of `mla-tune share export`"
_SCALED_WITHIN = 1.3  # of the law's count: as far as fuller waves may move it

log = logging.getLogger("mla_tuner")


@dataclass(frozen=True)
class Donor:
    """A device with the versions that it was tuned with, and its winners.

    `origin` says where they come from. `found` holds rows by `name_of` their bucket: what a table
    has after `"context": `, evidence included, or values of `ROW_COLUMNS`.
    """

    key: str
    name: str
    cores: int | None
    memory_gb: int
    kernel: str
    mlx: str
    system: str
    origin: str
    found: Mapping[bytes, bytes | Sequence[Any]] = field(repr=False)
    _read: dict[Bucket, Row | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Key, kernel, MLX and system."""
        return self.key, self.kernel, self.mlx, self.system

    def row(self, bucket: Bucket) -> Row | None:
        """The winner of a bucket; None, with a log line, where it is not as it must be."""
        raw = self.found.get(name_of(bucket))
        if raw is None:
            return None
        if bucket not in self._read:  # a bucket of bad values is said once
            self._read[bucket] = self._checked(raw, bucket)
        return self._read[bucket]

    def rows(self, bucket: Bucket) -> list[Row]:
        """Those of all contexts of a bucket's kind, ascending."""
        rows = (self.row(bucket._replace(context=n)) for n in CONTEXT_GRID)
        return [row for row in rows if row is not None]

    def _checked(self, raw: bytes | Sequence[Any], bucket: Bucket) -> Row | None:
        try:
            row = checked_row(self._values(raw) if isinstance(raw, bytes) else raw)
            if row.bucket != bucket:
                raise ValueError(f"expected {bucket}; got {row.bucket}")
            if not row.stays and (row.speedup_low is None or row.speedup_low < MIN_GAIN):
                raise ValueError(f"expected column speedup_low of {MIN_GAIN} or more")
            return row
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s: a bucket of %s is left out: %.200s", self.origin, self.key, error)
            return None

    def _values(self, text: bytes) -> list[Any]:
        """Of a bucket's line, without its evidence. Raises ValueError, TypeError or KeyError."""
        versions = {"kernel": self.kernel, "mlx": self.mlx, "system": self.system}
        line = _BUCKET + text.partition(b"\n")[0] + b"]}"
        fields = json.loads(line) | versions | {"stage": "duel"}
        return [fields[name] for name in ROW_COLUMNS]


def name_of(bucket: Bucket) -> bytes:
    """What a table has of a bucket after `"context": `. Never raises."""
    context, batch, heads, dtype, kv_lora_rank, rope_dim, q_len, layout = bucket
    try:
        name = (
            f'{context}, "batch": {batch}, "heads": {heads}, "dtype": "{dtype}", '
            f'"kv_lora_rank": {kv_lora_rank}, "rope_dim": {rope_dim}, "q_len": {q_len}, '
            f'"layout": "{layout}"'
        )
    except ValueError:  # Python writes no int of more than 4300 digits
        return b""
    return name.encode(errors="replace")


def load(device: Device, kernel: str, database: Path) -> list[Donor]:
    """Devices of the family, tuned with this kernel, the nearest first. Never raises for what it
    finds: a table that can't be used is one log line.
    """
    found = [*_packaged(device.family, kernel), *_imported(device.family, kernel, database)]
    usable = (each for each in found if each.key == device.key or (each.cores and device.cores))
    return sorted(usable, key=lambda each: _distance(each, device))


def _distance(donor: Donor, device: Device) -> tuple[object, ...]:
    """The same device, then the nearest core count by ratio, then the same memory."""
    away = abs(math.log(donor.cores / device.cores)) if donor.cores and device.cores else 0.0
    other_memory = donor.memory_gb != device.memory_gb
    return donor.key != device.key, away, other_memory, donor.key, donor.mlx, donor.system


def scaled(plan: Plan, bucket: Bucket, theirs: int | None, ours: int | None) -> Plan:
    """A plan of a device with `theirs` cores for one with `ours`: partitions follow the law, or the
    nearest count by ratio that keeps the cores about as busy as any close to it.
    """
    if plan.path != "split" or not theirs or not ours or theirs == ours:
        return plan
    ratio = law(1.0, bucket, plan.tile, ours) / law(1.0, bucket, plan.tile, theirs)
    wanted = plan.partitions * ratio
    few, many = math.floor(wanted / _SCALED_WITHIN), math.ceil(wanted * _SCALED_WITHIN)
    near = range(min(max(2, few), MAX_PARTITIONS), min(max(2, many), MAX_PARTITIONS) + 1)
    real = sorted({pieces(bucket.context, count) for count in near} - {1})
    tasks = row_groups(bucket.heads * bucket.q_len, plan.tile) * bucket.batch
    shares = {count: busy(bucket.context, count, tasks, ours) for count in real}
    full = [n for n in real if shares[n] >= NEARLY_AS_FULL * max(shares.values())]
    count = min(full, key=lambda n: round(abs(math.log(n / wanted)), 9), default=plan.partitions)
    return Plan("split", count, plan.tile)


# --- what they have for a device ------------------------------------------------------------------


class Offer(NamedTuple):
    """A plan for this device, what its donor measured of both native paths, and why."""

    plan: Plan
    speedups: Speedups
    reason: str


class Relatives:
    """Devices of the family, the nearest first, as `device` with `versions` sees them.

    A twin is this very device with the same kernel, MLX and system, all of them known.
    """

    def __init__(
        self, shared: Sequence[Donor], device: Device, versions: tuple[str, str, str]
    ) -> None:
        self._device, self._versions = device, versions
        here = (device.key, *versions)
        self._twins = [each for each in shared if versions[-1] and each.identity == here]
        self._donors = [each for each in shared if each not in self._twins]

    def twin_rows(self, bucket: Bucket) -> Iterator[tuple[Row, Donor]]:
        """What twins found for a bucket."""
        for twin in self._twins:
            row = twin.row(bucket)
            if row:
                yield row, twin

    @property
    def twin_buckets(self) -> int:
        """How many buckets twins have; those of several count more than once."""
        return sum(len(twin.found) for twin in self._twins)

    def twin_kin(self, bucket: Bucket) -> list[Tuned]:
        """What twins found for all contexts of a bucket's kind."""
        return [tuned(row) for twin in self._twins for row in twin.rows(bucket)]

    def offers(self, bucket: Bucket) -> Iterator[Offer]:
        """What the others would run, scaled to the cores here."""
        for donor in self._donors:
            found = _theirs(bucket, donor)
            if found:
                plan = scaled(found.plan, bucket, donor.cores, self._device.cores)
                change = "" if plan == found.plan else f", scaled to {plan} for these cores"
                yield Offer(plan, found.speedups, f"{self._whose(donor)}: {found.reason}{change}")

    @property
    def none(self) -> str:
        """Why there was no offer."""
        has = "has none of this bucket" if self._donors else "is known with this kernel"
        return f"no other device of {self._device.family} {has}"

    def _whose(self, donor: Donor) -> str:
        """A donor's name, and what else differs from here."""
        _, mlx, system = self._versions
        other = f", MLX {donor.mlx}" if donor.mlx != mlx else ""
        other += f", {donor.system}" if donor.system != system else ""
        return f"{donor.name} with {donor.cores} cores ({donor.origin}{other})"


def _theirs(bucket: Bucket, donor: Donor) -> Offer | None:
    """What a donor runs."""
    row = donor.row(bucket)
    if row:
        gain = "nothing beats" if row.stays else f"{row.plan} is {row.speedup:.3g}x"
        return Offer(row.plan, known(row), f"{gain} {row.baseline} there, {row.day}")
    ends = around(bucket, [tuned(each) for each in donor.rows(bucket)])
    if ends is None:
        return None
    plan = fits.between(bucket, *ends, donor.cores)
    speedups = fits.speedups_between(fits.share_of(bucket.context, *ends), *ends)
    below, above = (end.bucket.context for end in ends)
    return Offer(plan, speedups, f"{plan} between its contexts {below} and {above}")


def known(row: Row) -> Speedups:
    """What was measured of both native paths."""
    return Speedups(row.single_speedup, row.split_speedup)


def tuned(row: Row) -> Tuned:
    """A row as `fits` takes it."""
    return Tuned(row.bucket, row.plan, known(row), row.baseline)


def joined(own: list[Tuned], others: Sequence[Tuned]) -> list[Tuned]:
    """Tuned buckets in order; own ones win, then earlier ones."""
    if not others:
        return own
    found = {each.bucket: each for each in (*reversed(others), *own)}
    return [found[bucket] for bucket in sorted(found)]


def around(bucket: Bucket, kin: Sequence[Tuned]) -> tuple[Tuned, Tuned] | None:
    """Of ascending contexts the nearest on both sides."""
    above = next((i for i, each in enumerate(kin) if each.bucket > bucket), 0)
    below = above - 1
    if above and kin[below].bucket == bucket:  # tuned, but the back end refuses its plan
        below -= 1
    return (kin[below], kin[above]) if above and below >= 0 else None


# --- the table that is installed -----------------------------------------------------------------


def _packaged(family: str, kernel: str) -> list[Donor]:
    if not NAME.fullmatch(family):
        return []
    folder = next((each for each in FOLDERS if each.is_dir()), FOLDERS[0])
    path = folder / f"{family}.json"
    try:
        return list(_donors(data_of(path), family, kernel, f"the shared table {path.name}"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("the shared table %s is not used: %.200s", path, error)
        return []


def data_of(path: Path) -> bytes:
    """A table's bytes, lines ended by LF. Raises OSError or ValueError: no file, or too large."""
    data = content(path, MAX_BYTES)
    return data.replace(b"\r\n", b"\n") if b"\r" in data else data


def _donors(data: bytes, family: str, kernel: str, origin: str) -> Iterator[Donor]:
    """The devices of a table with this kernel. Raises ValueError: it has not the layout."""
    head, *parts = data.split(_BUCKETS)
    rest, buckets = [head], []
    for part in parts:
        lines, end, after = part.partition(_END)
        rest.append(end + after if end else part)  # without any bucket there is no end either
        buckets.append(lines if end else b"")
    table = json.loads(_BUCKETS.join(rest))
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise ValueError(f"expected version {VERSION} of the format")
    if table["family"] != family:
        raise ValueError(f"it is of family {table['family']!a:.80}")
    devices = table["devices"]
    left = isinstance(devices, list) and any(device["buckets"] for device in devices)
    if not isinstance(devices, list) or len(devices) != len(buckets) or left:
        raise ValueError(_LAYOUT)
    for device, lines in zip(devices, buckets, strict=True):
        if device["kernel"] == kernel:
            yield Donor(**_facts(device), origin=origin, found=_named(lines))


def _named(buckets: bytes) -> dict[bytes, bytes]:
    """Texts of buckets by `name_of`. Raises ValueError: one could not be found."""
    before, *texts = buckets.split(_BUCKET)
    found = {text[: text.find(_PATH)]: text for text in texts}
    all_named = _NAMES.fullmatch(b"".join([name + b"\n" for name in found]))
    if before or not all_named or buckets.count(_EVIDENCE) != len(found):
        raise ValueError(_LAYOUT)
    return found


_FACTS: dict[str, tuple[type, ...]] = {
    "key": (str,),
    "name": (str,),
    "cores": (int, NoneType),
    "memory_gb": (int,),
    "kernel": (str,),
    "mlx": (str,),
    "system": (str,),
}


def _facts(device: Mapping[str, Any]) -> dict[str, Any]:
    for name, kinds in _FACTS.items():
        value = device[name]
        if type(value) not in kinds or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(f"devices: {name} can't be {value!a:.80}")
        if isinstance(value, int) and not 0 < value < 1 << 31:
            raise ValueError(f"devices: {name} can't be {value!a:.80}")
    return {name: device[name] for name in _FACTS}


# --- what was imported ---------------------------------------------------------------------------


def _imported(family: str, kernel: str, database: Path) -> Iterator[Donor]:
    donors: dict[tuple[Any, ...], dict[bytes, Sequence[Any]]] = {}
    for facts, values in read_imported(database, family, kernel):
        bucket = Bucket(*values[: len(Bucket._fields)])
        donors.setdefault(facts, {})[name_of(bucket)] = values
    for facts, found in donors.items():
        try:
            known = _facts(dict(zip(_FACTS, facts, strict=True)))
        except ValueError as error:
            log.warning("an imported device is not used: %.200s", error)
            continue
        yield Donor(**known, origin="imported", found=found)
