"""The stopwatch: plans of one shape, proven correct, then timed side by side in shuffled rounds."""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import mlx.core as mx

from . import cases, ops
from .device import GB, Device, use
from .errors import BusyError
from .evidence import (
    FAR_BEHIND,
    LOSER_P,
    MIN_ROUNDS,
    Measurement,
    median_interval,
    paired,
    percentile,
    slower_p,
)
from .plan import MLX, Plan
from .shapes import Geometry, Shape

DRIFT = 0.05  # a round whose canary strays this far from its running median is dropped
CANARY_MEMORY = 5  # rounds in that median; dropped ones count, so a lasting change is accepted
PAUSE_S = 0.05  # after a dropped round: long enough for a short disturbance to pass
SAMPLE_S = 1e-3  # shorter samples are mostly timer and scheduler
MAX_INNER = 64
COLD_CACHES = 3  # times the last-level cache that a ring of cases covers
MEMORY_SHARE = 0.25  # of the machine's memory that a ring may take


@dataclass(frozen=True)
class Effort:
    """How long plans are timed.

    settled: rounds after which a plan that is far behind in each of them leaves, be it `mlx`;
    MIN_ROUNDS give it an interval first. most: rounds at most. ranked: losers leave by a
    signed-rank test too. seconds: after which a settled race gets no more rounds. The clock may end
    it, never the score: looking again until the answer pleases would void the intervals.
    """

    settled: int
    most: int
    ranked: bool = False
    seconds: float = math.inf


FULL = Effort(settled=MIN_ROUNDS, most=21)  # every plan gets its interval
SEARCH = Effort(settled=2, most=10, ranked=True)  # finds the plan worth a duel
DUEL = Effort(settled=MIN_ROUNDS, most=61, seconds=10.0)  # tells a gain of 5 % from noise of 3 %


@dataclass(frozen=True)
class Checked:
    """Whether a plan's result is right on the real shape, and the seconds of its first call."""

    ok: bool
    max_error: float
    reason: str
    seconds: float


class Runner(Protocol):
    """Where results and times come from: this machine, a recording, or a simulated device."""

    def check(self, plan: Plan) -> Checked:
        """Runs a plan once against the truth. May raise anything that running it raises."""

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        """Seconds a call over `inner` chained calls, and the plan that really ran."""

    def now(self) -> float:
        """Seconds on the clock that budgets count."""

    def pause(self, seconds: float) -> None:
        """Lets a disturbance pass."""


class Runners(Protocol):
    """Makes the runner of a shape; all runners of one maker share a clock."""

    def __call__(self, shape: Shape, seed: int) -> Runner:
        """A runner whose random choices follow from `seed`."""

    def now(self) -> float:
        """Seconds on that clock."""


Progress = Callable[[Measurement], None]


def measure(
    shape: Shape,
    plans: Sequence[Plan],
    *,
    device: Device,
    budget_s: float,
    seed: int = 0,
    runner: Runner | None = None,
    progress: Progress | None = None,
    effort: Effort = FULL,
) -> list[Measurement]:
    """Each plan's correctness, times and speed-up over `mlx` on one shape, in the order of `plans`.

    Correctness comes first, for every plan; a wrong or failing one is never timed. Then all plans
    are timed once a round, in shuffled order, each on another cold cache. `mlx`, where it is among
    the plans, is the canary: when it drifts, the round is dropped. Ratios pair times of one round.

    budget_s: seconds for everything. Plans that it leaves no round for have the status `timeout`;
    no plan is started after it. progress: told of each plan when it is finished.
    """
    runner = runner or LiveRunners(device)(shape, seed)
    session = _Session(shape, plans, runner, effort, random.Random(seed), runner.now() + budget_s)
    session.check()
    session.time(progress or (lambda measurement: None))
    return session.results()


@contextmanager
def machine_lock() -> Iterator[None]:
    """Held while timing, so that two tuners never disturb each other. It dies with the process.

    Raises:
        BusyError: another process holds it.
    """
    path = Path(tempfile.gettempdir()) / "mla-tuner.lock"
    try:
        lock = _open_lock(path)
    except OSError as error:
        raise BusyError(f"cannot open the lock file {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BusyError(f"another process is tuning on this machine ({path} is locked)") from error
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """The lock file, made where it isn't there yet: for all users, whatever the umask is."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        # First without O_CREAT: Linux refuses it on another user's file in a shared folder.
        return os.open(path, flags)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process was faster
            lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(lock, 0o666)
            return lock
    return os.open(path, flags)


@dataclass
class _Entry:
    """One plan on its way through a session."""

    plan: Plan
    inner: int = 1
    cost_s: float = 0.0  # of the last sample
    live: bool = False
    status: str = "timeout"
    message: str = "the budget ended before its first round"
    max_error: float | None = None
    executed: Plan | None = None
    samples: list[float] = field(default_factory=list)  # seconds a call, by kept round

    def fail(self, status: str, message: str) -> None:
        self.status, self.message, self.live = status, message, False
        self.samples.clear()


class _Session:
    def __init__(
        self,
        shape: Shape,
        plans: Sequence[Plan],
        runner: Runner,
        effort: Effort,
        rng: random.Random,
        deadline: float,
    ) -> None:
        self.shape, self.runner, self.effort = shape, runner, effort
        self.rng, self.deadline = rng, deadline
        self.entries = [_Entry(plan) for plan in plans]
        self.rounds = self.dropped = 0
        self._canary: list[float] = []  # seconds by round, dropped ones included

    # --- correctness -------------------------------------------------------------------------

    def check(self) -> None:
        for entry in self.entries:
            if self.runner.now() >= self.deadline:
                break
            try:
                checked = self.runner.check(entry.plan)
                entry.max_error = checked.max_error
                if checked.ok:
                    entry.inner = self._inner(entry.plan, checked.seconds)
                    entry.cost_s = checked.seconds
                    entry.live = True
                else:
                    entry.fail("wrong", checked.reason)
            except Exception as error:  # whatever a plan dies of is evidence, not the tuner's end
                entry.fail("error", _line(error))

    def _inner(self, plan: Plan, first_s: float) -> int:
        """Chained calls that make a sample long enough; the first call's time still has warm-up."""
        if first_s > 10 * SAMPLE_S:
            return 1
        seconds, _ = self.runner.sample(plan, 1)
        calls = SAMPLE_S / max(seconds, SAMPLE_S / MAX_INNER) if math.isfinite(seconds) else 1
        return max(1, math.ceil(calls))

    # --- rounds ------------------------------------------------------------------------------

    def time(self, progress: Progress) -> None:
        live = [entry for entry in self.entries if entry.live]
        waiting = list(self.entries)
        until = self.runner.now() + self.effort.seconds
        while live and self.rounds < self.effort.most and self._fits(live):
            self._round(live)
            self._leave()
            live = [entry for entry in self.entries if entry.live]
            for entry in [entry for entry in waiting if not entry.live]:
                waiting.remove(entry)
                progress(self._result(entry))
            over = len(live) == 1 or self.runner.now() >= until
            if over and self.rounds >= self.effort.settled:
                break
        for entry in waiting:
            progress(self._result(entry))

    def _fits(self, live: list[_Entry]) -> bool:
        return self.runner.now() + sum(entry.cost_s for entry in live) < self.deadline

    def _round(self, live: list[_Entry]) -> None:
        """Times every live plan once; the round counts for all of them or for none."""
        order = self.rng.sample(live, len(live))
        sampled = [(entry, self._sample(entry)) for entry in order]
        times = {entry.plan: seconds for entry, seconds in sampled if entry.live}
        if self._drifted(times):
            self.dropped += 1
            self.runner.pause(PAUSE_S)
            return
        self.rounds += 1
        for entry, seconds in sampled:
            if entry.live:
                entry.status, entry.message = "ok", ""
                entry.samples.append(seconds)

    def _sample(self, entry: _Entry) -> float:
        try:
            seconds, executed = self.runner.sample(entry.plan, entry.inner)
        except Exception as error:  # as in `check`
            entry.fail("error", _line(error))
            return math.nan
        entry.executed, entry.cost_s = executed, seconds * entry.inner
        if not _same(entry.plan, executed):
            entry.fail("error", f"asked for {entry.plan}, but {executed or 'nothing'} ran")
        elif not (math.isfinite(seconds) and seconds > 0):
            entry.fail("error", f"the clock gave {seconds} s")
        return seconds

    def _drifted(self, times: dict[Plan, float]) -> bool:
        """Whether the canary strayed in a race that is close enough for that to matter.

        At most half of all rounds are dropped: an ever restless machine gets wide intervals instead
        of none.
        """
        seconds = times.get(MLX)
        if seconds is None:
            return False
        self._canary.append(seconds)
        usual = median(self._canary[-CANARY_MEMORY:])
        ratios = [seconds / other for plan, other in times.items() if plan != MLX]
        close = any(1 / FAR_BEHIND < ratio < FAR_BEHIND for ratio in ratios)
        return close and self.dropped < self.rounds and abs(seconds / usual - 1) > DRIFT

    def _leave(self) -> None:
        """Plans that can't win any more stop taking time."""
        live = [entry for entry in self.entries if entry.live and entry.samples]
        if self.rounds < self.effort.settled or not live:
            return
        leader = min(live, key=lambda entry: median(entry.samples))
        for entry in live:
            ratios = paired(entry.samples, leader.samples)
            far = min(ratios) > FAR_BEHIND
            lost = self.effort.ranked and entry.plan != MLX
            if far or (lost and slower_p([math.log(ratio) for ratio in ratios]) < LOSER_P):
                entry.live = False

    # --- results -----------------------------------------------------------------------------

    def results(self) -> list[Measurement]:
        return [self._result(entry) for entry in self.entries]

    def _result(self, entry: _Entry) -> Measurement:
        if entry.status != "ok":
            return Measurement(
                *(self.shape, entry.plan, entry.status, entry.message, entry.max_error),
                executed=entry.executed,
            )
        canary = next((e.samples for e in self.entries if e.plan == MLX), [])
        ratios = paired(canary, entry.samples)
        low, high = median_interval(ratios) or (None, None)
        samples_us = tuple(seconds * 1e6 for seconds in entry.samples)
        note = f"{self.dropped} rounds dropped: mlx drifted" if self.dropped else ""
        return Measurement(
            *(self.shape, entry.plan, "ok", note, entry.max_error, len(samples_us)),
            *(median(samples_us), percentile(samples_us, 0.1), percentile(samples_us, 0.9)),
            ratio=median(ratios) if ratios else None,
            ratio_low=low,
            ratio_high=high,
            samples_us=samples_us,
            executed=entry.executed,
        )


def _same(asked: Plan, executed: Plan | None) -> bool:
    """Whether the plan that ran is the one asked for; no tile asks for the default."""
    if executed is None or (executed.path, executed.partitions) != (asked.path, asked.partitions):
        return False
    return not asked.tile or executed.tile == asked.tile


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class LiveRunners:
    """Makes runners that really run, and keeps the cache memory that their cases are cut from.

    From then on `device` is MLX's default: nothing else must be timed in its name.
    """

    def __init__(self, device: Device) -> None:
        use(device)
        self.device = device
        self._pool: cases.Pool | None = None

    def __call__(self, shape: Shape, seed: int) -> Runner:
        return LiveRunner(shape, self.pool_for, seed)

    def now(self) -> float:
        return time.perf_counter()

    def pool_for(self, shape: Shape) -> cases.Pool:
        """A pool of at least three last-level caches and one case, within a quarter of the memory.

        Raises:
            MemoryError: one case alone is larger than that.
        """
        limit = int(MEMORY_SHARE * self.device.memory_gb * GB)
        block_bytes = shape.batch * 64 * shape.geometry.width * 4  # each sequence's last block
        one = shape.cache_bytes + block_bytes
        if one > limit:
            raise MemoryError(
                f"the cache takes {one / GB:.1f} GiB, a quarter of memory is {limit / GB:.1f}"
            )
        wanted = max(one, min(COLD_CACHES * self.device.cache_bytes, limit))
        pool = self._pool
        if pool is None or not _serves(pool, shape.dtype, shape.geometry, wanted):
            self._pool = None  # free the old one first
            pool = self._pool = cases.Pool(shape.dtype, shape.geometry, wanted)
        return pool


def _serves(pool: cases.Pool, dtype: str, geometry: Geometry, nbytes: int) -> bool:
    token_bytes = geometry.width * (4 if dtype == "float32" else 2)
    return (pool.dtype, pool.geometry) == (dtype, geometry) and (
        (pool.tokens + 64) * token_bytes > nbytes
    )


class LiveRunner:
    """Runs plans on MLX's default device as serving does, on a ring of cold caches."""

    def __init__(
        self, shape: Shape, pool_for: Callable[[Shape], cases.Pool], seed: int = 0
    ) -> None:
        self.shape = shape
        self._pool_for, self._seed = pool_for, seed
        self._ring: list[cases.Case] = []
        self._at = 0
        self._probe: cases.Case | None = None
        self._checked: dict[Plan, Checked] = {}

    def check(self, plan: Plan) -> Checked:
        """Against float64 on some rows of every row tile; NaN in the slots that nobody may read."""
        if plan not in self._checked:
            self._checked[plan] = self._check(plan)
        return self._checked[plan]

    def _check(self, plan: Plan) -> Checked:
        self._pool_for(self.shape)  # refuses what would make the machine swap
        case = self._probe = self._probe or cases.make_case(self.shape, seed=self._seed)
        start = self.now()
        out, lse = self._call(case, case.q_nope, plan, return_lse=plan.native)
        mx.eval(out) if lse is None else mx.eval(out, lse)
        seconds = self.now() - start
        found = cases.check(case, out, lse, plan, rows=self._rows())
        return Checked(found.ok, found.max_error, found.reason, seconds)

    def _rows(self) -> list[int]:
        """The first and last row, and one of every eight: no row tile of any kernel is smaller."""
        rows, rng = self.shape.rows, random.Random(self._seed)
        some = {min(at + rng.randrange(8), rows - 1) for at in range(0, rows, 8)}
        return sorted({0, rows - 1} | some)

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        chain = [self._next() for _ in range(inner)]
        start = time.perf_counter()
        out: mx.array | None = None
        for case in chain:
            # Layers follow one another: a GPU must not overlap them here either.
            query = case.q_nope if out is None else mx.depends([case.q_nope], [out])[0]
            out, _ = self._call(case, query, plan)
        mx.eval(out)
        seconds = (time.perf_counter() - start) / inner
        run = ops.last_run()
        return seconds, run.executed if run else None

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
        pool = self._pool_for(self.shape)
        if self._at == len(self._ring):
            self._ring.append(pool.case(self.shape, self._at))
        case = self._ring[self._at]
        self._at = (self._at + 1) % pool.ring(self.shape)
        return case

    def now(self) -> float:
        return time.perf_counter()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
