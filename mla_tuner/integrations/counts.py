"""What serving did: how many calls were routed, by which plan, why the others were not, and for
which buckets the table had no plan.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..plan import Decision
from ..shapes import Bucket, Geometry, bucket_of
from ..words import counted

MAX_MISSES = 1024  # buckets that are told apart; more than any server meets
FORMAT = "mla-tuner misses 1"
_MISSES = ("family", "gates")  # sources
MAX_BYTES = 16 << 20  # of a file of misses
_CURE = "a server writes them with stats().write_misses()"

log = logging.getLogger("mla_tuner")
_writing = threading.Lock()  # threads of a process write the same file


@dataclass
class Stats:
    """Counts since `install`, of attention calls of the classes that were recognised, and of those
    of the function that the others share whose keys are their values.

    routed: calls that ran through `mla_decode`. stock: calls that ran the engine's own code, or the
    same maths where the cache was already written. plans: routed calls by plan. reasons: stock
    calls by reason. look_ups: plans looked up, one a step. classes: "routed" for each attention
    class of the engine and each shared function, or why it is left alone. misses: look-ups by
    bucket that nothing of such a device answered, so that the gates decided or another device lent
    its plan; `MAX_MISSES` buckets, those beyond count in other_misses. engine: whose own code it
    is, for the log.
    """

    routed: int = 0
    stock: int = 0
    look_ups: int = 0
    plans: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    classes: dict[str, str] = field(default_factory=dict)
    misses: Counter[Bucket] = field(default_factory=Counter)
    other_misses: int = 0
    engine: str = "mlx-lm"

    def count_routed(self, plan: str) -> None:
        self.routed += 1
        self.plans[plan] += 1

    def count_stock(self, reason: str, detail: str = "") -> None:
        """The first call of each reason is a log line."""
        if reason not in self.reasons:
            more = f" ({detail})" if detail else ""
            log.info("%s's own attention runs: %s%s", self.engine, reason, more)
        self.stock += 1
        self.reasons[reason] += 1

    def count_look_up(
        self,
        decision: Decision,
        context: int,
        batch: int,
        heads: int,
        dtype: str,
        q_len: int,
        geometry: Geometry,
        layout: str,
    ) -> None:
        """A policy's answer, and what it was asked. A miss is one that nobody measured on such a
        device, for a bucket that can be tuned: contexts outside the grid have none.
        """
        self.look_ups += 1
        if decision.source not in _MISSES:
            return
        bucket = bucket_of(context, batch, heads, dtype, geometry, q_len, layout)
        if bucket in self.misses or (bucket.context and len(self.misses) < MAX_MISSES):
            self.misses[bucket] += 1
        elif bucket.context:
            self.other_misses += 1

    def write_misses(self, path: str | Path | None = None) -> Path | None:
        """Writes the misses for `mla-tune --from-misses`; by default beside the database, in a file
        of this process's own that each call replaces: processes never wait for one another.

        Returns the file. Never raises: None, and a log line, where it can't be written.
        """
        try:
            target = _own_place() if path is None else Path(path).expanduser()
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            from ..frozen import write  # not at import: it brings sqlite3

            with _writing:
                write(target, _to_json(self.misses.copy()))
        except (OSError, StoreError, RuntimeError) as error:
            log.warning("the misses were not written: %s", error)
            return None
        return target

    def copy(self) -> Stats:
        return replace(
            self,
            plans=Counter(self.plans),
            reasons=Counter(self.reasons),
            classes=dict(self.classes),
            misses=Counter(self.misses),
        )

    def __str__(self) -> str:
        routed, look_ups = counted(self.routed, "call"), counted(self.look_ups, "look-up")
        lines = [f"{routed} routed, {self.stock} stock, {look_ups}"]
        lines += [f"  {count} by {plan}" for plan, count in self.plans.most_common()]
        lines += [f"  {count} stock: {why}" for why, count in self.reasons.most_common()]
        missed = self.misses.total() + self.other_misses
        if missed:
            lines.append(f"  misses of the table: {missed}, in buckets: {len(self.misses)}")
        return "\n".join(lines)


def read_misses(path: Path) -> list[Bucket]:
    """The buckets of a file that `write_misses` wrote, or of all beside a database, in whose folder
    `path` then is; most frequent first.

    Raises:
        StoreError: one line: there is no miss, or a file holds something else.
    """
    files = sorted(path.glob("misses-*.json")) if os.path.isdir(path) else [path]
    total: Counter[Bucket] = Counter()
    for file in files:
        try:
            total.update(_from_json(file))
        except FileNotFoundError as error:
            raise StoreError(f"no misses at {file}: {_CURE}") from error
        except OSError as error:
            raise StoreError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreError(f"{file} holds no misses of a server: {error!s:.200}") from error
    if not total:
        raise StoreError(f"no misses in {path}: {_CURE}")
    return [bucket for bucket, _ in total.most_common()]


def _own_place() -> Path:
    from ..table import default_path  # not at import: as above

    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    return default_path().with_name(f"misses-{host}-{os.getpid()}.json")


def _to_json(misses: Counter[Bucket]) -> bytes:
    rows = [{"count": count, **bucket._asdict()} for bucket, count in misses.most_common()]
    return json.dumps({"format": FORMAT, "misses": rows}, indent=1).encode()


def _from_json(file: Path) -> dict[Bucket, int]:
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode):  # a pipe is waited for, a device may never end
        raise ValueError("it is no file")
    if facts.st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MB")
    data = json.loads(file.read_bytes())
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected the format {FORMAT!r}")
    return dict(_checked(data["misses"]))


def _checked(rows: Iterable[dict[str, Any]]) -> Iterable[tuple[Bucket, int]]:
    for row in rows:
        bucket, count = Bucket(*(row[name] for name in Bucket._fields)), row["count"]
        whole = {type(number) for number in (count, *bucket.geometry)} == {int}  # 64.0 == 64
        if not whole or count < 1 or bucket.context < 1 or bucket.shape.bucket != bucket:
            raise ValueError(f"expected a bucket and its count; got {row}")
        yield bucket, count
