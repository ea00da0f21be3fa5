"""What all evidence in the shared file says together: the tables that the server gives away."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from ..share_format import VERSION, SharedBucket, SharedDevice, SharedTable, render
from ..share_merge import merged
from . import archive


class Reading:
    """Tables by family, as of the last `refresh`, and a line for each row that is in none."""

    def __init__(self) -> None:
        self.tables: dict[str, SharedTable] = {}
        self.left_out: list[str] = []
        self._at = 0  # the newest row that is in them
        self._texts: dict[tuple[str, str], str] = {}

    def refresh(self, db: sqlite3.Connection) -> None:
        """Take in what was added since the last time."""
        families: dict[str, list[archive.Piece]] = {}
        at, left_out = self._at, [*self.left_out]
        for number, found in archive.since(db, at):
            at = number
            if isinstance(found, str):
                left_out.append(found)
            else:
                families.setdefault(found.family, []).append(found)
        if families:
            added = {family: _table(family, pieces) for family, pieces in families.items()}
            new = {name: merged(self.tables.get(name, each), each) for name, each in added.items()}
            self.tables, self._texts = {**self.tables, **new}, {}
        self._at, self.left_out = at, left_out

    def text(self, family: str, kernel: str) -> str | None:
        """A family's table with the devices of one kernel ("": all); None where there are none."""
        texts = self._texts  # before the tables: never an old text among new ones
        if (family, kernel) not in texts:
            table = self.tables.get(family)
            devices = table.devices if table else ()
            wanted = tuple(each for each in devices if kernel in ("", each.kernel))
            if table is None or not wanted:
                return None
            texts[family, kernel] = render(table.model_copy(update={"devices": wanted}))
        return texts[family, kernel]


def _table(family: str, pieces: Iterable[archive.Piece]) -> SharedTable:
    """Pieces as a table to be merged: `merged` makes its winners, in any case."""
    devices = tuple(
        SharedDevice.model_construct(
            **piece.facts,
            runs=(piece.run,),
            buckets=(
                SharedBucket.model_construct(**piece.bucket._asdict(), evidence=(piece.entry,)),
            ),
            thresholds=(),
        )
        for piece in pieces
    )
    return SharedTable.model_construct(version=VERSION, family=family, devices=devices)
