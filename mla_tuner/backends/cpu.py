"""The CPU: the plain MLX paths, and our kernel where `_native` is built for the MLX in use."""

from __future__ import annotations

import logging
import os
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import mlx.core as mx

from ..caches import PagedCache
from ..plan import Plan
from ..shapes import Geometry, Shape
from . import Call, next_ticket
from .mlx_paths import MlxBackend, run_mlx_rows

log = logging.getLogger("mla_tuner")

TILES = (16, 32, 64, 128)  # query rows that one task may take
DEFAULT_ROWS = 64  # most rows of a default task: more would leave cores idle at 128 heads
_ROWS_OF = {"": 0} | {f"r{tile}": tile for tile in TILES}  # 0: the kernel chooses by idle threads
_TICKET_BITS = 0x7FFFFFFF  # _native keeps an int; weeks of serving come round
_CURE = "run `make setup`, or reinstall mla-tuner where a C++ compiler and that MLX are found"
# Largest relative error of a whole output in the self-check; wrong kernels miss it by far.
_SELF_CHECK_BOUND = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}


class CpuBackend(MlxBackend):
    """Runs native plans through `_native`, loaded at the first question about it."""

    def __init__(self) -> None:
        super().__init__("cpu")

    @cached_property
    def _loaded(self) -> tuple[Any, str]:
        """The native module or None, and why it is None."""
        native, reason = _load()
        if native is None:
            log.warning("%s; only the mlx paths run", reason)
        else:
            native.set_threads(_threads())
        return native, reason

    def digest(self) -> str:
        if self._loaded[0] is None:
            return ""
        return str(_module("_build_info").KERNEL_DIGEST)

    def available(self) -> tuple[bool, str]:
        native, reason = self._loaded
        return native is not None, reason

    def tiles(self, rows: int) -> tuple[str, ...]:
        return _tiles(rows) if self._loaded[0] is not None else ()

    def refusal(self, plan: Plan, shape: Shape) -> str | None:
        if not plan.native:
            return None
        native, reason = self._loaded
        if native is None:
            return reason
        if plan.tile not in _ROWS_OF:
            return f"the CPU kernel's tiles are {', '.join(filter(None, _ROWS_OF))}"
        return None

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        if not plan.native:
            return super().run(plan, call)
        cache = call.cache
        k_pe, table = None, None
        if isinstance(cache, PagedCache):
            table = cache.block_tables
        elif call.q_pe is not None:
            k_pe = cache.k_pe
        answer: tuple[mx.array, mx.array] = self._loaded[0].mla_decode(
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
        )
        return answer

    def executed(self, ticket: int) -> Plan | None:
        record = self._record(ticket)
        if record is None:
            return None
        partitions, rows = record["partitions"], record["tile"]
        # A tile larger than the call's rows is cut down to them: still the tile that was asked for.
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
        native = self._loaded[0]
        record: dict[str, Any] = native.last_run() if native is not None else {"ticket": 0}
        return record if record["ticket"] == ticket & _TICKET_BITS else None

    @lru_cache(maxsize=1)  # noqa: B019 - one object per process
    def self_check(self) -> tuple[bool, str]:
        if self._loaded[0] is None:
            return self.available()
        try:
            with mx.stream(mx.cpu):
                faults = [
                    fault
                    for dtype, bound in _SELF_CHECK_BOUND.items()
                    for plan in (Plan("single"), Plan("split", 3))
                    if (fault := self._fault(plan, dtype, bound))
                ]
        except Exception as error:  # serving asks, and must get an answer
            faults = [f"{type(error).__name__}: {error}"]
        return not faults, faults[0] if faults else "the CPU kernel agrees with mlx_rows"

    def _fault(self, plan: Plan, dtype: mx.Dtype, bound: float) -> str | None:
        """What is wrong with one small run, measured against `mlx_rows` in float32."""
        call = _probe(dtype)
        out, lse = self.run(plan, call)
        want, want_lse = run_mlx_rows(_widened(call))
        assert lse is not None
        assert want_lse is not None
        error = _float(mx.linalg.norm(out - want) / mx.linalg.norm(want))
        lse_error = _float(mx.abs(lse - want_lse).max())
        ran = self.executed(call.ticket)
        if ran is None or (ran.path, ran.partitions) != (plan.path, plan.partitions):
            return f"asked for {plan}, the CPU kernel ran {ran}"
        if not (error <= bound and lse_error <= 1e-3):
            return f"{plan} in {call.shape.dtype} is wrong by {error:.1e}, LSE by {lse_error:.1e}"
        return None


@lru_cache(maxsize=1024)
def _tiles(rows: int) -> tuple[str, ...]:
    """Every tile up to the first that holds all rows; first the default."""
    fit = next((i for i, tile in enumerate(TILES) if tile >= rows), len(TILES) - 1)
    useful = TILES[: fit + 1]
    default = max(tile for tile in useful if tile <= DEFAULT_ROWS)
    return tuple(f"r{tile}" for tile in sorted(useful, key=lambda tile: (tile != default, tile)))


def _load() -> tuple[Any, str]:
    """`_native`, or None and the reason, which names the release it needs and the cure."""
    installed = str(vars(mx)["__version__"])  # missing in MLX's type stubs
    try:
        built = _module("_build_info").MLX_VERSION
    except ImportError:
        return None, f"the CPU kernel is not built (for MLX {installed}): {_CURE}"
    # Before the load: a binary for another MLX may crash instead of failing to link.
    if built != installed:
        return None, f"the CPU kernel was built for MLX {built}, but this is {installed}: {_CURE}"
    try:
        native = _module("_native")
        native.check_runtime()
    except (ImportError, OSError) as error:
        return None, (
            f"the CPU kernel, built for MLX {built}, does not load with {installed} "
            f"({error}): {_CURE}"
        )
    return native, ""


def _module(name: str) -> Any:
    """A module that the build makes: absent from the source tree, so imported by name."""
    return import_module(f"{__package__.rpartition('.')[0]}.{name}")


def _threads() -> int:
    """MLA_TUNER_THREADS, else the cores that this process may use."""
    wanted = os.environ.get("MLA_TUNER_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if wanted:
        log.warning("MLA_TUNER_THREADS=%r is not a positive number: ignored", wanted)
    from ..device import usable_cores

    return usable_cores()


def _float(array: mx.array) -> float:
    return float(array)


def _probe(dtype: mx.Dtype) -> Call:
    """A small ragged paged call: 2 sequences, 20 heads, 2 query tokens."""
    keys = mx.random.split(mx.random.key(0), 3)

    def normal(i: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=keys[i]).astype(dtype)

    lengths = (300, 70)  # the longer one makes three pieces
    table = mx.arange(38, dtype=mx.int32).reshape(2, 19)
    cache = PagedCache(normal(0, 38, 16, 576), table, lengths)
    name = str(dtype).removeprefix("mlx.core.")
    shape = Shape(max(lengths), 2, 20, name, Geometry(512, 64), 2, "paged", lengths)
    q_nope, q_pe = normal(1, 2, 20, 2, 512), normal(2, 2, 20, 2, 64)
    return Call(q_nope, q_pe, cache, 0.05, shape, lengths, (0, 0), next_ticket(), want_lse=True)


def _widened(call: Call) -> Call:
    """The same numbers in float32."""
    cache, q_pe = call.cache, call.q_pe
    assert isinstance(cache, PagedCache)
    assert q_pe is not None
    latent = cache.latent.astype(mx.float32)
    return call._replace(
        q_nope=call.q_nope.astype(mx.float32),
        q_pe=q_pe.astype(mx.float32),
        cache=PagedCache(latent, cache.block_tables, cache.lengths),
    )
