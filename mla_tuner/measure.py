"""The stopwatch: plans of one shape, proven correct, then timed side by side in shuffled rounds."""

from __future__ import annotations

import fcntl
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from .errors import BusyError, TunerError
from .evidence import (
    FAILED,
    FAR_BEHIND,
    MIN_ROUNDS,
    Measurement,
    lost,
    median_interval,
    paired,
    percentile,
)
from .plan import MLX, Plan
from .shapes import Shape
from .words import counted

DRIFT = 0.05  # a round whose canary strays this far from its running median is dropped
CANARY_MEMORY = 5  # rounds in that median; dropped ones count, so a lasting change is accepted
PAUSE_S = 0.05  # after a dropped round: long enough for a short disturbance to pass
LONGEST_PAUSE_S = 1.6  # each pause is twice the last where that did not help
SAMPLE_S = 1e-3  # shorter samples are mostly timer and scheduler
QUEUED_SAMPLE_S = 4e-4  # of GPU time, with neither of them in it
MAX_INNER = 64  # about as many layers as a model has: nobody chains more before a sync
LONGEST_CHAIN = 10  # samples that a chain may last if it is only as long as that of another plan
# By the GPU's clock, which a burst of other work does not reach:
HOPELESS = 4.0  # so much slower once is enough to know where the baseline stands
BEHIND = 1.1  # so much slower in every round: two are enough


@dataclass(frozen=True)
class Effort:
    """How long plans are timed.

    settled: rounds after which a plan that is far behind in each of them leaves, be it the
    baseline; MIN_ROUNDS give it an interval first. most: rounds at most. ranked: losers leave by a
    signed-rank test too. seconds: after which there are no more rounds than `least`, waits not
    counted. So cheap plans get many rounds and expensive ones enough. The clock may end a race,
    never the score: looking again until the answer pleases would void the intervals.
    brief: of GPU time, a race that no verdict comes from. The baseline leaves after one round in
    which it is `HOPELESS`, others where they are `BEHIND`, and the race ends where each interval to
    the leader is narrower than this share.
    """

    settled: int
    most: int
    ranked: bool = False
    seconds: float = math.inf
    least: int = 0
    brief: float = 0.0


# An interval reaches to each side 0.8 standard deviations of a round with 12 rounds, 0.6 with 19,
# 0.3 with 61, 0.2 with 121.
FULL = Effort(settled=MIN_ROUNDS, most=61, seconds=2.0, least=12)  # every plan gets its interval
# Finds the plan worth a duel. Ten rounds of 4 % noise found a plan 5 % ahead of ten others 31 times
# of 100, 41 rounds 99 times (simulated).
SEARCH = Effort(settled=2, most=41, ranked=True, seconds=1.0, least=10, brief=0.015)
# Picks among a few that are close, from different groups of a search.
PLAYOFF = Effort(settled=MIN_ROUNDS, most=161, seconds=2.0, least=10, brief=0.01)
DUEL = Effort(settled=MIN_ROUNDS, most=121, seconds=6.0, least=19)  # tells 5 % from noise of 3 %


@dataclass(frozen=True)
class Checked:
    """Whether a plan's result is right on the real shape, and the seconds of a warm call."""

    ok: bool
    max_error: float
    reason: str
    seconds: float


class LateError(TunerError):
    """There is no time that could be believed, of a plan that ran; the text begins with `LATE`."""


class Runner(Protocol):
    """Where results and times come from: this machine, a recording, or a simulated device."""

    @property
    def queued(self) -> bool:
        """Whether samples are GPU time of calls that were queued before they began: no scheduler
        and no host is in them, so that short ones do. Never raises.
        """

    def check(self, plan: Plan) -> Checked:
        """Runs a plan once against the truth. May raise anything that running it raises."""

    def sample(self, plan: Plan, inner: int) -> tuple[float, Plan | None]:
        """Seconds a call over `inner` chained calls, and the plan that really ran.

        Raises:
            LateError: where `queued`, the calls never were before they began.
        """

    def now(self) -> float:
        """Seconds on the clock that budgets count."""

    def pause(self, seconds: float) -> None:
        """Lets a disturbance pass."""


class Runners(Protocol):
    """Makes the runner of a shape; all runners of one maker share a clock."""

    def __call__(self, shape: Shape, seed: int) -> Runner:
        """A runner whose random choices follow from `seed`."""

    def fresh(self, shape: Shape, seed: int) -> AbstractContextManager[Runner]:
        """The runner of the final duel, which shares no state with earlier ones.

        Where this machine is measured it lives in a new process.
        """

    def now(self) -> float:
        """Seconds on that clock."""


Progress = Callable[[Measurement], None]


def measure(
    shape: Shape,
    plans: Sequence[Plan],
    *,
    budget_s: float,
    runner: Runner,
    seed: int = 0,
    progress: Progress | None = None,
    effort: Effort = FULL,
    baselines: Sequence[Plan] = (MLX,),
) -> list[Measurement]:
    """Each plan's correctness, times and speed-up over the baseline on one shape, in the order of
    `plans`.

    Correctness comes first, for every plan; a wrong or failing one is never timed. Then all plans
    are timed once a round, in shuffled order, each on another cold cache. The baseline is the
    canary: when it drifts, the round is dropped and a pause follows, longer each time in a row.
    Ratios pair times of one round.

    budget_s: seconds for everything. Plans that it leaves no round for have the status `timeout`;
    no plan is started after it. progress: told of each plan when it is finished. baselines: the
    first of them that is among the plans and does not fail is the baseline; else there is none.
    """
    deadline = runner.now() + budget_s
    session = _Session(shape, plans, baselines, runner, effort, random.Random(seed), deadline)
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
        _take(lock, path)
        yield
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(f"another process is tuning on this machine ({path} is locked)") from error
    except OSError as error:  # some network file systems have no locks
        raise BusyError(f"cannot lock the file {path}: {error.strerror}") from error


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


def sample_seconds(queued: bool) -> float:
    """Seconds that a sample lasts at least."""
    return QUEUED_SAMPLE_S if queued else SAMPLE_S


def chain_length(seconds: float, queued: bool) -> int:
    """Chained calls of so many seconds that make a sample long enough, up to `MAX_INNER`."""
    usable = math.isfinite(seconds) and seconds > 0
    return min(MAX_INNER, math.ceil(sample_seconds(queued) / seconds)) if usable else 1


def chain(runner: Runner, plan: Plan, warm_s: float) -> tuple[int, float]:
    """The chain's length for a plan whose warm call took so long, and the seconds of its calls."""
    inner, cost_s = 1, warm_s
    if warm_s > LONGEST_CHAIN * sample_seconds(runner.queued):
        return inner, cost_s
    for again in range(4):  # the first samples may still be slower than what follows
        seconds, _ = runner.sample(plan, inner)
        cost_s = seconds if math.isfinite(seconds) and seconds > 0 else warm_s
        wanted = chain_length(seconds, runner.queued)
        if again and wanted <= inner:
            break
        inner = max(inner, wanted)
    return inner, cost_s


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
        baselines: Sequence[Plan],
        runner: Runner,
        effort: Effort,
        rng: random.Random,
        deadline: float,
    ) -> None:
        self.shape, self.runner, self.effort = shape, runner, effort
        self.rng, self.deadline = rng, deadline
        self.entries = [_Entry(plan) for plan in plans]
        found = {entry.plan: entry for entry in self.entries}
        self._baselines = [found[plan] for plan in baselines if plan in found]
        self.rounds = self.dropped = 0
        self.paused_s = 0.0
        # Seconds of each baseline by round, dropped ones included.
        self._canary: dict[Plan, list[float]] = {entry.plan: [] for entry in self._baselines}
        self._astray = 0  # rounds dropped in a row
        self._queued = runner.queued

    @property
    def baseline(self) -> _Entry | None:
        """What the others are compared with."""
        return next((entry for entry in self._baselines if entry.status not in FAILED), None)

    # --- correctness -------------------------------------------------------------------------

    def check(self) -> None:
        for entry in self.entries:
            if self.runner.now() >= self.deadline:
                break
            try:
                checked = self.runner.check(entry.plan)
                entry.max_error = checked.max_error
                if checked.ok:
                    entry.inner, entry.cost_s = chain(self.runner, entry.plan, checked.seconds)
                    entry.live = True
                else:
                    entry.fail("wrong", checked.reason)
            except LateError as error:
                entry.fail("timeout", one_line(error))
            except Exception as error:  # whatever a plan dies of is evidence, not the tuner's end
                entry.fail("error", one_line(error))
        self._even_out()

    def _even_out(self) -> None:
        """Chains of one length, as far as that stays cheap: waiting for a chain's end is shared by
        its calls, and a plan just above `SAMPLE_S` would pay twice what one just below it pays.
        """
        live = [entry for entry in self.entries if entry.live]
        longest = 1 if self._queued else max((entry.inner for entry in live), default=1)
        longest_s = LONGEST_CHAIN * sample_seconds(self._queued)
        for entry in live:
            affordable = int(longest_s / entry.cost_s) if entry.cost_s > 0 else 1
            entry.inner = max(entry.inner, min(longest, affordable))
            entry.cost_s *= entry.inner

    # --- rounds ------------------------------------------------------------------------------

    def time(self, progress: Progress) -> None:
        live = [entry for entry in self.entries if entry.live]
        waiting = list(self.entries)
        started = self.runner.now()
        while live and self.rounds < self.effort.most and self._fits(live):
            self._round(live)
            self._leave()
            live = [entry for entry in self.entries if entry.live]
            for entry in [entry for entry in waiting if not entry.live]:
                waiting.remove(entry)
                progress(self._result(entry))
            if self._over(live, self.runner.now() - started - self.paused_s):
                break
        for entry in waiting:
            progress(self._result(entry))

    def _over(self, live: list[_Entry], spent_s: float) -> bool:
        """Whether one plan is left, the time for a race used up, or enough known."""
        if self.rounds < self.effort.settled:
            return False
        late = spent_s >= self.effort.seconds and self.rounds >= self.effort.least
        return len(live) == 1 or late or (self._brief and self._known(live))

    @property
    def _brief(self) -> bool:
        return self._queued and self.effort.brief > 0

    def _known(self, live: list[_Entry]) -> bool:
        """Whether more rounds would change next to nothing: by the width of the intervals, not by
        where they are.
        """
        leader = min(live, key=lambda entry: median(entry.samples or [math.inf]))
        spans = [median_interval(paired(entry.samples, leader.samples)) for entry in live]
        return all(span and span[1] - span[0] < self.effort.brief for span in spans)

    def _fits(self, live: list[_Entry]) -> bool:
        return self.runner.now() + sum(entry.cost_s for entry in live) < self.deadline

    def _round(self, live: list[_Entry]) -> None:
        """Times every live plan once; the round counts for all of them or for none."""
        order = self.rng.sample(live, len(live))
        sampled = [(entry, self._sample(entry)) for entry in order]
        times = {entry.plan: seconds for entry, seconds in sampled if entry.live}
        if self._drifted(times):
            self._wait()
            return
        self.rounds += 1
        self._astray = 0
        for entry, seconds in sampled:
            if entry.live:
                entry.status, entry.message = "ok", ""
                entry.samples.append(seconds)

    def _wait(self) -> None:
        """Lets the disturbance pass; all waits together are no longer than the race may take."""
        self.dropped += 1
        self._astray += 1
        longest = min(LONGEST_PAUSE_S, self.effort.seconds - self.paused_s)
        left = self.deadline - self.runner.now()
        seconds = min(PAUSE_S * 2.0 ** (self._astray - 1), longest, left)
        if seconds > 0:
            self.runner.pause(seconds)
            self.paused_s += seconds

    def _sample(self, entry: _Entry) -> float:
        try:
            seconds, executed = self.runner.sample(entry.plan, entry.inner)
            if self._queued and not entry.samples and seconds * entry.inner < entry.cost_s / 2:
                # What the warm call took on the host said nothing: a compiler, or pages on their
                # way, were in it. A GPU that wakes up for each call is half as fast.
                entry.inner, _ = chain(self.runner, entry.plan, seconds)
                seconds, executed = self.runner.sample(entry.plan, entry.inner)
        except LateError as error:
            entry.fail("timeout", one_line(error))
            return math.nan
        except Exception as error:  # as in `check`
            entry.fail("error", one_line(error))
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
        canary = self.baseline
        if canary is None or canary.plan not in times:
            return False
        seconds, known = times[canary.plan], self._canary[canary.plan]
        known.append(seconds)
        usual = median(known[-CANARY_MEMORY:])
        ratios = [seconds / other for plan, other in times.items() if plan != canary.plan]
        close = any(1 / FAR_BEHIND < ratio < FAR_BEHIND for ratio in ratios)
        return close and self.dropped < self.rounds and abs(seconds / usual - 1) > DRIFT

    def _leave(self) -> None:
        """Plans that can't win any more stop taking time."""
        live = [entry for entry in self.entries if entry.live and entry.samples]
        if not live:
            return
        leader, default = min(live, key=lambda entry: median(entry.samples)), self.baseline
        for entry in live:
            ratios = paired(entry.samples, leader.samples)
            if self.rounds < self.effort.settled:
                entry.live = not (self._brief and entry is default and ratios[0] > HOPELESS)
                continue
            ranked = self.effort.ranked and entry is not default
            far = BEHIND if ranked and self._brief else FAR_BEHIND
            if min(ratios) > far or (ranked and lost(ratios)):
                entry.live = False

    # --- results -----------------------------------------------------------------------------

    def results(self) -> list[Measurement]:
        return [self._result(entry) for entry in self.entries]

    def _result(self, entry: _Entry) -> Measurement:
        if entry.status != "ok":
            return Measurement(
                *(self.shape, entry.plan, entry.status, entry.message, entry.max_error),
                executed=entry.executed,
                dropped=self.dropped,
                paused_s=self.paused_s,
                inner=entry.inner,
            )
        default = self.baseline
        ratios = paired(default.samples, entry.samples) if default else []
        low, high = median_interval(ratios) or (None, None)
        samples_us = tuple(seconds * 1e6 for seconds in entry.samples)
        drifted = f"{default.plan} drifted" if default else ""
        note = f"{counted(self.dropped, 'round')} dropped: {drifted}" if self.dropped else ""
        return Measurement(
            *(self.shape, entry.plan, "ok", note, entry.max_error, len(samples_us)),
            *(median(samples_us), percentile(samples_us, 0.1), percentile(samples_us, 0.9)),
            ratio=median(ratios) if ratios else None,
            ratio_low=low,
            ratio_high=high,
            samples_us=samples_us,
            executed=entry.executed,
            dropped=self.dropped,
            paused_s=self.paused_s,
            inner=entry.inner,
        )


def _same(asked: Plan, executed: Plan | None) -> bool:
    """Whether the plan that ran is the one asked for; no tile asks for the default."""
    if executed is None or (executed.path, executed.partitions) != (asked.path, asked.partitions):
        return False
    return not asked.tile or executed.tile == asked.tile


def one_line(error: Exception) -> str:
    """Kind and text of an error; of a known failure the text, which is a sentence."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, TunerError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
