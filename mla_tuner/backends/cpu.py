"""The CPU: the plain MLX paths, and our kernel where `_native` is built for the MLX in use."""

from __future__ import annotations

import logging
import os
import re
import reprlib
from collections.abc import Hashable
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx

from ..caches import PagedCache
from ..plan import Plan
from ..shapes import DTYPES, Shape
from . import Call
from .mlx_paths import MlxBackend
from .native import load
from .self_check import fault

log = logging.getLogger("mla_tuner")

TILES = (16, 32, 64, 128)  # query rows that one task may take
MAX_THREADS = 1024  # more than any machine has cores
DEFAULT_ROWS = 64  # most rows of a default task: more would leave cores idle at 128 heads
_ROWS_OF = {"": 0} | {f"r{tile}": tile for tile in TILES}  # 0: the kernel chooses by idle threads
_TICKET_BITS = 0x7FFFFFFF  # _native keeps an int; weeks of serving come round


class CpuBackend(MlxBackend):
    """Runs native plans through `_native`, loaded here, once: `backends.get` makes one object."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._kernel = load(lambda native: native.set_threads(_threads()))
        if self._kernel.native is None:
            log.warning("%s; only the mlx paths run", self._kernel.reason)

    def digest(self) -> str:
        return self._kernel.digest

    def available(self) -> tuple[bool, str]:
        return self._kernel.native is not None, self._kernel.reason

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return _tiles(shape.rows) if self._kernel.native is not None else ()

    def signature(self, *arrays: mx.array | None) -> Hashable:
        native = self._kernel.native
        if native is None:
            return super().signature(*arrays)
        key: bytes = native.signature(*arrays)
        return key

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        if not plan.native:
            return super().refusal(plan, shape)
        if self._kernel.native is None:
            return self._kernel.reason
        if plan.tile not in _ROWS_OF:
            return f"the CPU kernel's tiles are {', '.join(filter(None, _ROWS_OF))}"
        return None

    def proof(self, plan: Plan, shape: Shape) -> tuple[bool, str]:
        return self.self_check()  # one text serves all tiles

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        if not plan.native:
            return super().run(plan, call)
        cache = call.cache
        k_pe, table = None, None
        if isinstance(cache, PagedCache):
            table = cache.block_tables
        elif call.q_pe is not None:
            k_pe = cache.k_pe
        answer: tuple[mx.array, mx.array | None] = self._kernel.native.mla_decode(
            call.q_nope,
            call.q_pe,
            cache.latent,
            k_pe,
            table,
            call.lengths,
            call.starts,
            call.scale,
            plan.partitions,
            _ROWS_OF[plan.tile],
            call.ticket & _TICKET_BITS,
            call.want_lse,
        )
        return answer

    def executed(self, ticket: int) -> Plan | None:
        record = self._record(ticket)
        if record is None:
            return None
        partitions, rows = record["partitions"], record["tile"]
        # A tile larger than the call's rows is cut down to them: named by the next tile up.
        tile = next((tile for tile in TILES if tile >= rows), rows)
        return Plan("split" if partitions > 1 else "single", partitions, f"r{tile}")

    def detail(self, ticket: int) -> dict[str, object]:
        record = self._record(ticket)
        if record is None:
            return {}
        return {
            "isa": record["isa"],
            "threads": record["threads"],
            "tasks": record["tasks"],
            "rows_per_task": record["tile"],
        }

    def _record(self, ticket: int) -> dict[str, Any] | None:
        native = self._kernel.native
        record: dict[str, Any] = native.last_run() if native is not None else {"ticket": 0}
        return record if record["ticket"] == ticket & _TICKET_BITS else None

    def self_check(self) -> tuple[bool, str]:
        return self._self_checked

    @cached_property
    def _self_checked(self) -> tuple[bool, str]:
        if self._kernel.native is None:
            return self.available()
        try:
            with mx.stream(mx.cpu):
                faults = [
                    found
                    for dtype in DTYPES
                    for plan in (Plan("single"), Plan("split", 3))
                    if (found := fault(self, plan, dtype))
                ]
        except Exception as error:  # serving asks, and must get an answer
            faults = [f"{type(error).__name__}: {error}"]
        return not faults, faults[0] if faults else "the CPU kernel agrees with mlx_rows"


@lru_cache(maxsize=1024)
def _tiles(rows: int) -> tuple[str, ...]:
    """Every tile up to the first that holds all rows; first the default."""
    fit = next((i for i, tile in enumerate(TILES) if tile >= rows), len(TILES) - 1)
    useful = TILES[: fit + 1]
    default = max(tile for tile in useful if tile <= DEFAULT_ROWS)
    return tuple(f"r{tile}" for tile in sorted(useful, key=lambda tile: (tile != default, tile)))


def _threads() -> int:
    """MLA_TUNER_THREADS, else the cores that this process may use."""
    wanted = os.environ.get("MLA_TUNER_THREADS", "")
    if re.fullmatch("[0-9]{1,4}", wanted) and 1 <= int(wanted) <= MAX_THREADS:
        return int(wanted)
    if wanted:
        text = reprlib.repr(wanted)
        log.warning("MLA_TUNER_THREADS=%s is not in 1..%d: ignored", text, MAX_THREADS)
    from ..device import usable_cores

    return usable_cores()
