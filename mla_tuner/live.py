"""Runners that really run: on MLX's device, in this process or in one beside it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from math import ceil, inf
from typing import Any, TypeVar

import mlx.core as mx

from . import backends, cases, ops
from .backends.head_start import HeadStart, head_start
from .device import GB, Device, free_bytes, use
from .errors import DeviceError
from .evidence import LATE
from .measure import Checked, LateError, Runner, one_line
from .plan import Plan
from .shapes import Geometry, Shape
from .worker import Worker

COLD_CACHES = 3  # times the last-level cache that a ring of cases covers
MEMORY_SHARE = 0.25  # of the machine's memory that a ring may take,
FREE_SHARE = 0.5  # and of what others had left when measuring began: plans need room, too
CHECKED_TOKENS = 1 << 14  # that differ in a case for the check: the truth of more takes seconds
FIRST_HEAD_START_S = 40e-6  # a call, before it is known how long the host takes
TRIES = 6  # for the host to get ahead of the GPU, from 0.1 ms to the longest head start
# Of a graph, before MLX hands it to the GPU. Its own limits would hand out ten or more a chain, and
# with ten in flight MLX waits for one to end: the host would never get ahead.
WHOLE_CHAINS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "1000000"}

Result = TypeVar("Result")


class LostError(DeviceError):
    """A call failed, and this process can use the device no longer: an illegal access of CUDA comes
    back from whatever is called after it. Another process can.
    """


class LiveRunners:
    """Makes runners that really run, and keeps the cache memory that their cases are cut from.

    From then on `device` is MLX's default: nothing else must be timed in its name.
    """

    def __init__(self, device: Device) -> None:
        if device.backend == "cuda":
            for name, value in WHOLE_CHAINS.items():  # MLX reads them at its first launch
                os.environ.setdefault(name, value)
        use(device)
        self.device = device
        self._pool: cases.Pool | None = None
        self._pool_bytes = 0

    def __call__(self, shape: Shape, seed: int) -> LiveRunner:
        if self.clock:
            mx.clear_cache()  # what the host has read of the last one would be used, and timed
        return LiveRunner(shape, self, seed)

    @cached_property
    def clock(self) -> HeadStart | None:
        """What gives GPU time; None where chains are timed from outside."""
        return head_start(self.device.backend)

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[Runner]:
        """See `Runners.fresh`."""
        self.make_room()
        with closing(Worker("the process of the duel", _Host, self.device)) as worker:
            yield RemoteRunner(worker, shape, seed, lambda: self.clock is not None)

    def make_room(self) -> None:
        """Frees the memory of a long context, and what MLX has kept of its scratch: the other
        process will need as much.
        """
        if self._pool_bytes > COLD_CACHES * self.device.cache_bytes:
            self._pool, self._pool_bytes = None, 0
        _free_scratch()

    def now(self) -> float:
        return time.perf_counter()

    @cached_property
    def most_bytes(self) -> int:
        """Memory that a ring may take."""
        whole, free = self.device.memory_gb * GB, free_bytes(self.device)
        return int(min(MEMORY_SHARE * whole, FREE_SHARE * free))

    def refuse_beyond(self, what: str, nbytes: int) -> None:
        """Raises MemoryError where that is more than `most_bytes`."""
        if nbytes > self.most_bytes:
            raise MemoryError(
                f"{what} takes {nbytes / GB:.1f} GiB; no more than {self.most_bytes / GB:.1f} may "
                "be taken, a quarter of memory and half of what was free"
            )

    def pool_for(self, shape: Shape) -> cases.Pool:
        """A pool of at least three last-level caches and one case, within `most_bytes`.

        Raises:
            MemoryError: one case alone is larger than that.
        """
        block_bytes = shape.batch * 64 * shape.geometry.width * 4  # each sequence's last block
        one = shape.cache_bytes + block_bytes
        self.refuse_beyond("the cache", one)
        wanted = max(one, min(COLD_CACHES * self.device.cache_bytes, self.most_bytes))
        pool = self._pool
        if pool is None or not _serves(pool, shape.dtype, shape.geometry, wanted):
            self._drop_pool()
            pool = self._pool = cases.Pool(shape.dtype, shape.geometry, wanted)
            self._pool_bytes = wanted
        return pool

    def ring(self, shape: Shape) -> int:
        """How many cases follow one another: as many as it takes until the first one is cold."""
        cold = ceil(COLD_CACHES * self.device.cache_bytes / max(1, shape.cache_bytes))
        return min(self.pool_for(shape).ring(shape), cold + 1)

    def _drop_pool(self) -> None:
        self._pool, self._pool_bytes = None, 0
        mx.clear_cache()


def _free_scratch() -> None:
    mx.clear_cache()
    mx.synchronize()  # CUDA frees in the order of a stream, and keeps the memory until then


def _serves(pool: cases.Pool, dtype: str, geometry: Geometry, nbytes: int) -> bool:
    token_bytes = geometry.width * (4 if dtype == "float32" else 2)
    return (pool.dtype, pool.geometry) == (dtype, geometry) and (
        (pool.tokens + 64) * token_bytes > nbytes
    )


class LiveRunner:
    """Runs plans on MLX's default device as serving does, on a ring of cold caches."""

    def __init__(self, shape: Shape, runners: LiveRunners, seed: int = 0) -> None:
        self.shape = shape
        self._runners, self._seed, self._clock = runners, seed, runners.clock
        self._host_s: dict[Plan, float] = {}  # of queueing a call, where the host was ahead
        self._read: list[mx.array | None] = []
        self._ring: list[cases.Case] = []
        self._at = 0
        self._probe: cases.Case | None = None
        self._checked: dict[Plan, Checked] = {}

    @property
    def queued(self) -> bool:
        """See `Runner.queued`."""
        return self._clock is not None

    def check(self, plan: Plan) -> Checked:
        """Against float64 on some rows of every row tile; NaN in the slots that nobody may read."""
        if plan not in self._checked:
            self._checked[plan] = _leaving_room(self._check, plan)
        return self._checked[plan]

    def _check(self, plan: Plan) -> Checked:
        self._runners.pool_for(self.shape)  # refuses what would make the machine swap
        case = self._probe = self._probe or cases.make_case(
            self.shape, seed=self._seed, distinct=CHECKED_TOKENS
        )
        start = self.now()
        out, lse = self._call(case, case.q_nope, plan, return_lse=plan.native)
        mx.eval(out) if lse is None else mx.eval(out, lse)
        first_s = self.now() - start
        found = cases.check(case, out, lse, plan, rows=self._rows())
        if self._clock:  # MLX moves to the host what the host reads, and would use it again
            self._read += [out, lse]
        warm_s = self._warm(case, plan, first_s) if found.ok else first_s
        return Checked(found.ok, found.max_error, found.reason, warm_s)

    def _warm(self, case: cases.Case, plan: Plan, first_s: float) -> float:
        """Seconds of a second call: the first may load and compile. On a CPU that takes some
        milliseconds: what takes a second there takes it again. So do MLX's own paths on a GPU, or
        if not, one call makes a sample.
        """
        slow_s = 1.0 if mx.default_device().type is mx.cpu else inf if plan.native else 0.25
        if first_s > slow_s:
            return first_s
        start = self.now()
        mx.eval(self._call(case, case.q_nope, plan)[0])
        return self.now() - start

    def _rows(self) -> list[int]:
        """The first and last row, and one of every eight: no row tile of any kernel is smaller."""
        rows, rng = self.shape.rows, random.Random(self._seed)
        some = {min(at + rng.randrange(8), rows - 1) for at in range(0, rows, 8)}
        return sorted({0, rows - 1} | some)

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        seconds = _leaving_room(self._timed, plan, inner)
        run = ops.last_run()
        return seconds / inner, run.executed if run else None

    def _timed(self, plan: Plan, inner: int) -> float:
        chain = [self._next() for _ in range(inner)]
        return self._queued(plan, chain) if self._clock else self._waited(plan, chain)

    def _waited(self, plan: Plan, chain: Sequence[cases.Case]) -> float:
        """Seconds from the first line of Python to the last result."""
        start = time.perf_counter()
        out: mx.array | None = None
        for case in chain:
            # Layers follow one another: a GPU must not overlap them here either.
            query = case.q_nope if out is None else mx.depends([case.q_nope], [out])[0]
            out, _ = self._call(case, query, plan)
        mx.eval(out)
        return time.perf_counter() - start

    def _queued(self, plan: Plan, chain: Sequence[cases.Case]) -> float:
        """Seconds on the GPU, with all of the chain queued before it began.

        Raises:
            LateError: it never was: the host's delays would be in them.
        """
        assert self._clock
        host_s = self._host_s.get(plan, FIRST_HEAD_START_S) * len(chain)
        for _ in range(TRIES):
            out = chain[0].q_nope
            for case in chain:  # an answer is the next query: a graph overlaps what has no edge
                out, _ = self._call(case, out, plan)
            wait_s = 1.5 * host_s + 1e-4
            timed = self._clock.time(out, wait_s)
            if timed.ahead:
                self._host_s[plan] = timed.host_s / len(chain)
                return timed.gpu_s
            host_s = max(timed.host_s, 2 * wait_s)
        raise LateError(f"{LATE}: the last chain took it {timed.host_s * 1e3:.3g} ms")

    def _call(
        self, case: cases.Case, query: mx.array, plan: Plan, return_lse: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        if return_lse:
            return ops.mla_decode(
                query, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
            )
        return ops.mla_decode(query, case.q_pe, case.cache, scale=case.scale, plan=plan), None

    def _next(self) -> cases.Case:
        """The next case of the ring, so that its cache has long been evicted."""
        if self._at == len(self._ring):
            self._ring.append(self._runners.pool_for(self.shape).case(self.shape, self._at))
        case = self._ring[self._at]
        self._at = (self._at + 1) % self._runners.ring(self.shape)
        return case

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _leaving_room(call: Callable[..., Result], *args: object) -> Result:
    """What `call` returns. Where it fails, out of memory above all, what it took is free again: the
    next plan needs it.

    Raises:
        LostError: nothing can be freed, so that nothing will run here any more.
    """
    try:
        return call(*args)
    except Exception as error:
        failure = error.with_traceback(None)  # whose frames hold the arrays
    try:
        _free_scratch()
    except Exception as error:
        raise LostError(f"the device was lost: {one_line(failure)}") from error
    raise failure


class IsolatedRunners:
    """As `LiveRunners`, in a process beside this one: what crashes it is evidence, not the end.

    MLX 0.32.4 itself was seen to crash once in its CPU build (8K, batch 8, 128 heads; 2026-11-29).
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._worker = Worker("the process of the search", _Host, device)
        self._duels = Worker("the process of the duel", _Host, device)
        self._compiled: list[tuple[str, float]] = []  # in processes that have ended
        self._gpu_time: bool | None = None  # not asked yet

    def __enter__(self) -> IsolatedRunners:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()
        self._duels.close()

    def __call__(self, shape: Shape, seed: int) -> Runner:
        return RemoteRunner(self._worker, shape, seed, self.queued)

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[Runner]:
        """See `Runners.fresh`. On an NVIDIA GPU all duels share one process, which knows nothing of
        the search: another one would compile every kernel again, for seconds.
        """
        _make_room(self._worker)  # MLX's scratch may be far larger than the cache
        try:
            yield RemoteRunner(self._duels, shape, seed, self.queued)
        finally:
            if self.device.backend == "cuda":
                _make_room(self._duels)
            else:
                self._compiled += _compiled(self._duels)
                self._duels.close()

    def queued(self) -> bool:
        """Whether GPU time is measured, in every process from the first answer on; False where the
        search's can't say.
        """
        if self._gpu_time is None:
            self._gpu_time = self.device.backend == "cuda" and _queued(self._worker)
        return self._gpu_time

    def compiled(self) -> list[tuple[str, float]]:
        """Names of the kernels that were compiled, and seconds; without those of crashed ones."""
        return [*self._compiled, *self.ready()]

    def ready(self) -> list[tuple[str, float]]:
        """Those of them that a process which still lives has: no later bucket compiles them."""
        return [*_compiled(self._worker), *_compiled(self._duels)]

    def now(self) -> float:
        return time.perf_counter()


def _queued(worker: Worker) -> bool:
    with suppress(Exception):
        return bool(worker.call("queued"))
    return False


def _make_room(worker: Worker) -> None:
    try:
        if worker.alive:
            worker.call("make_room")
    except Exception:  # its memory is free when it has ended, too
        worker.close()


def _compiled(worker: Worker) -> list[tuple[str, float]]:
    with suppress(Exception):  # it is for people, and changes nothing
        if worker.alive:
            return list(worker.call("compiled"))
    return []


class RemoteRunner:
    """A `LiveRunner` in another process. It keeps the time there: the way to it costs nothing.

    queued: whether it must be GPU time. In a process with another clock all calls fail.
    """

    def __init__(self, worker: Worker, shape: Shape, seed: int, queued: Callable[[], bool]) -> None:
        self._worker, self._shape, self._seed, self._asked = worker, shape, seed, queued

    @cached_property
    def queued(self) -> bool:
        """As `LiveRunner.queued`; False where no process can say: the first check tells why."""
        return self._asked()

    def check(self, plan: Plan) -> Checked:
        """As `LiveRunner.check`; a death is a `DeviceError`, the next call starts another one. So
        it is where the process lost the device.
        """
        checked: Checked = self._call("check", plan)
        return checked

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        """As `LiveRunner.sample`; a death as in `check`."""
        seconds, executed = self._call("sample", plan, inner)
        return seconds, executed

    def _call(self, method: str, *args: object) -> Any:
        try:
            return self._worker.call(method, (self._shape, self._seed, self.queued), *args)
        except LostError:
            self._worker.close()  # every later plan would fail in it, and look as if it were wrong
            raise

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


What = tuple[Shape, int, bool]  # shape, seed, whether it must be GPU time


class _Host:
    """The other end of `RemoteRunner`: one runner at a time."""

    def __init__(self, device: Device) -> None:
        self._runners = LiveRunners(device)
        self._what: What | None = None
        self._runner: Runner | None = None

    def check(self, what: What, plan: Plan) -> Checked:
        return self._of(what).check(plan)

    def sample(self, what: What, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        return self._of(what).sample(plan, inner)

    def queued(self) -> bool:
        return self._runners.clock is not None

    def compiled(self) -> tuple[tuple[str, float], ...]:
        return tuple(backends.get(self._runners.device.backend).compiled())

    def make_room(self) -> None:
        self._what = self._runner = None
        self._runners.make_room()

    def _of(self, what: What) -> Runner:
        shape, seed, queued = what
        if queued != self.queued():  # times of two clocks are not to be compared, nor stored as one
            clocks = ("by the GPU's clock", "from outside")
            found, wanted = clocks if self.queued() else clocks[::-1]
            raise DeviceError(f"this process times {found}, where the run times {wanted}")
        if self._runner is None or what != self._what:
            self._runner = None  # with its memory, before there is another one
            self._runner, self._what = self._runners(shape, seed), what
        return self._runner
