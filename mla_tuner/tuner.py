"""Finds the best plan of each bucket within a time budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from itertools import count, product

from . import backends, recheck
from . import device as devices
from .candidates import candidates
from .conditions import PATIENCE_S, WINDOW_S, clock, settle
from .costs import SAMPLED_S, Costs
from .device import Device
from .errors import BudgetError, DeviceError
from .evidence import FAILED, Measurement, baseline, finalist
from .live import IsolatedRunners
from .measure import DUEL, PLAYOFF, SEARCH, Effort, Runner, Runners, machine_lock, measure, one_line
from .plan import MLX, MLX_PLANS, Plan
from .proposals import EXHAUSTIVE, OPTUNA_VERSION, Grid, Proposals, Tpe
from .recheck import Versions
from .shapes import DEEPSEEK, DTYPES, Bucket, Geometry, Shape
from .store import Store
from .table import Row

PLAYERS = 5  # the best of all groups, which meet in one race more
SEARCH_SHARE = 0.6  # of the time left may go to the search; the final duel needs the rest
SIGN_OF_LIFE = Shape(64, 1, 1, "float32")  # what any device can run, if anything
DISTURBED = 1.5  # times of the search and the duel apart: something else was in the samples


@dataclass(frozen=True)
class RunStarted:
    """`total` buckets are wanted; `days` are those on which some of them were tuned already."""

    device: Device
    budget_s: float
    total: int
    days: tuple[str, ...]


@dataclass(frozen=True)
class Waiting:
    """The machine is not fit for timing yet; `reason` is one sentence."""

    reason: str


@dataclass(frozen=True)
class BucketStarted:
    """`number` counts from 1 to `total`; `estimate_s` is what the bucket may take."""

    bucket: Bucket
    number: int
    total: int
    estimate_s: float


@dataclass(frozen=True)
class CandidateMeasured:
    """One plan of the bucket is finished, for better or worse."""

    bucket: Bucket
    measurement: Measurement


@dataclass(frozen=True)
class BucketTuned:
    """The bucket's winner is stored."""

    bucket: Bucket
    row: Row
    seconds: float


@dataclass(frozen=True)
class BucketSkipped:
    """No winner was stored; the reason says why: there was no time, or the baseline failed."""

    bucket: Bucket
    reason: str
    failed: bool = False


Outcome = BucketTuned | BucketSkipped
Event = RunStarted | Waiting | BucketStarted | CandidateMeasured | Outcome
Work = Callable[[Bucket], Outcome]  # tunes a bucket, if the budget allows it
Clock = Callable[[], float]  # seconds that the budget has left


@dataclass
class Summary:
    """What a run did. Reasons are one sentence each.

    `dropped` rounds did not count because the baseline drifted; `paused_s` is the time waited for
    that to pass.
    `compiled` names the kernels that were compiled, in all processes, and the seconds of each.
    """

    tuned: list[Row] = field(default_factory=list)
    skipped_known: list[Bucket] = field(default_factory=list)
    not_reached: list[tuple[Bucket, str]] = field(default_factory=list)
    failed: list[tuple[Bucket, str]] = field(default_factory=list)
    seconds: float = 0.0
    dropped: int = 0
    paused_s: float = 0.0
    compiled: list[tuple[str, float]] = field(default_factory=list)


def default_buckets(
    contexts: Iterable[int],
    batches: Iterable[int],
    heads: Iterable[int],
    dtypes: Iterable[str] = DTYPES,
    *,
    geometry: Geometry = DEEPSEEK,
    q_lens: Iterable[int] = (1,),
    layouts: Iterable[str] = ("paged",),
) -> list[Bucket]:
    """Buckets of all combinations, each once, in the order to tune them.

    The first layout, q_len and dtype come first; within them the cheap buckets, so that a short
    budget still covers a range of contexts, batches and heads. A single sequence is what most
    machines serve: larger batches count for more than they cost.
    """
    axes = product(layouts, q_lens, dtypes, heads, batches, contexts)
    shapes = [Shape(c, b, h, d, geometry, q, layout) for layout, q, d, h, b, c in axes]
    buckets = dict.fromkeys(shape.bucket for shape in shapes)
    kinds = {(b.layout, b.q_len, b.dtype): None for b in buckets}
    order = {kind: place for place, kind in enumerate(kinds)}

    def place(b: Bucket) -> tuple[int, float]:
        return order[b.layout, b.q_len, b.dtype], b.shape.flop * math.sqrt(b.batch)

    return sorted(buckets, key=place)


def in_turn(buckets: Sequence[Bucket], work: Work, left: Clock) -> None:
    """All buckets, one after the other."""
    for bucket in buckets:
        work(bucket)


def tune(
    store: Store,
    device: Device,
    buckets: Sequence[Bucket],
    *,
    budget_s: float,
    progress: Callable[[Event], None] | None = None,
    runners: Runners | None = None,
    seed: int = 0,
    force: bool = False,
    dispatch: Callable[[Sequence[Bucket], Work, Clock], None] = in_turn,
) -> Summary:
    """Measure and store the winner of each bucket in turn, as far as the budget goes.

    Buckets that this device, kernel and MLX already have are skipped, so a second run resumes. A
    bucket that would not fit in what is left of the budget is passed over; later ones may fit.
    Everything about a bucket is stored in one transaction when it is finished: an interrupt or kill
    loses the bucket in flight only.

    runners: makes what is measured; the device itself by default, and then the machine must be in
    a state fit for timing. force: it need not. dispatch: has those buckets tuned that it chooses.

    Raises:
        BudgetError: the budget ended before a single bucket was finished; its evidence is kept.
        BusyError: another process is tuning, or the machine is not fit for timing.
        DeviceError: nothing runs on the device any more; what was found out is stored.
        StoreError: the database refused; what was stored before is kept.
    """
    tell = progress or (lambda event: None)

    with ExitStack() as stack:
        stack.enter_context(machine_lock())
        live = None if runners else stack.enter_context(IsolatedRunners(device))
        made = runners or live
        assert made

        def state() -> dict[str, object]:
            # Another is timed than this machine, or the look at it alone would take the budget.
            if live is None or budget_s <= WINDOW_S:
                return {}
            found = settle(
                device,
                force=force,
                patience_s=min(PATIENCE_S, budget_s),
                tell=lambda reason: tell(Waiting(reason)),
            )
            return {**found, **clock(device, live.queued())}

        run = _Run(store, device, made, seed, tell, live.ready if live else list)
        options = {"budget_s": budget_s, "seed": seed, "force": force}
        run.tune(list(dict.fromkeys(buckets)), budget_s, options, state, dispatch)
        run.summary.compiled = live.compiled() if live else []
    summary = run.summary
    if summary.not_reached and not (summary.tuned or summary.skipped_known or summary.failed):
        bucket, reason = summary.not_reached[0]
        raise BudgetError(
            f"a budget of {budget_s:.3g} s is too small for a single bucket ({bucket}: {reason}): "
            f"try --budget {math.ceil(run.enough_s)}s, or smaller shapes"
        )
    return summary


class _Run:
    """One call of `tune`."""

    def __init__(
        self,
        store: Store,
        device: Device,
        runners: Runners,
        seed: int,
        tell: Callable[[Event], None],
        ready: Callable[[], list[tuple[str, float]]],
    ) -> None:
        self.store, self.device, self.runners, self.seed = store, device, runners, seed
        self.tell, self.ready = tell, ready
        self.backend = backends.get(device.backend)
        self.software = devices.software()
        self.versions = Versions.of(self.backend.digest(), self.software)
        self.summary = Summary()
        self.costs = Costs(runners)
        self.started = runners.now()
        self.enough_s = 0.0  # a budget for the first bucket that was not reached

    def tune(
        self,
        buckets: Sequence[Bucket],
        budget_s: float,
        options: Mapping[str, object],
        state: Callable[[], Mapping[str, object]],
        dispatch: Callable[[Sequence[Bucket], Work, Clock], None],
    ) -> None:
        """`state` gives the conditions for the record, or refuses them."""
        deadline = self.started + budget_s
        counting = self.store.tuned(self.device, *astuple(self.versions))
        known = {row.bucket: row for row in counting}
        self.summary.skipped_known = [bucket for bucket in buckets if bucket in known]
        wanted = [bucket for bucket in buckets if bucket not in known]
        days = tuple(known[bucket].day for bucket in self.summary.skipped_known)
        self.tell(RunStarted(self.device, budget_s, len(buckets), days))
        if not wanted:
            return
        run = self.store.start_run(
            self.device,
            kernel=self.versions.kernel,
            software={**self.software, "optuna": OPTUNA_VERSION},
            options={**options, "buckets": len(wanted)},
            conditions=state(),
        )
        before = {row.bucket: row for row in recheck.stale(self.store, self.device, self.versions)}
        numbers = count(1)

        def left() -> float:
            return deadline - self.runners.now()

        def work(bucket: Bucket) -> Outcome:
            number, old = next(numbers), before.get(bucket)
            estimate = self._estimate(bucket, old) if left() > 0 else 0.0
            left_s = left()  # the first estimate takes some of it
            enough_s = budget_s - left_s + estimate + SAMPLED_S
            if left_s <= 0:
                return self._pass_over(bucket, "the budget was used up", enough_s)
            if estimate > left_s:
                reason = f"needs about {estimate:.0f} s, {left_s:.0f} s are left"
                return self._pass_over(bucket, reason, enough_s)
            self.tell(BucketStarted(bucket, number, len(wanted), estimate))
            return self._bucket(run, bucket, old, deadline)

        dispatch(wanted, work, left)
        self.summary.seconds = self.runners.now() - self.started

    def _estimate(self, bucket: Bucket, old: Row | None) -> float:
        return recheck.seconds(old) if old else self.costs.estimate(bucket.shape)

    def _bucket(self, run: int, bucket: Bucket, old: Row | None, deadline: float) -> Outcome:
        started = self.runners.now()
        row = self._revalidated(run, old, deadline) if old else None
        failure = None
        if row is None:
            ready_s, search_started = self._ready_s(), self.runners.now()
            row, failure = self._tuned(run, bucket, deadline)
            if row:
                once_s = max(0.0, self._ready_s() - ready_s)  # less: a process has died
                seconds = max(0.0, self.runners.now() - search_started - once_s)
                self.costs.add(bucket.shape, seconds, 1e-6 * row.median_us * row.speedup)
        if row:
            self.summary.tuned.append(row)
            tuned = BucketTuned(bucket, row, self.runners.now() - started)
            self.tell(tuned)
            return tuned
        if failure:
            return self._fail(bucket, failure)
        reason, budget_s = "the budget ended before its verdict", deadline - self.started
        # It takes longer than was reckoned, and nobody knows by how much.
        return self._pass_over(bucket, reason, budget_s + max(budget_s, SAMPLED_S))

    def _ready_s(self) -> float:
        """Seconds that the compilation of kernels took which later buckets find ready."""
        return sum(seconds for _, seconds in self.ready())

    def _revalidated(self, run: int, old: Row, deadline: float) -> Row | None:
        """The winner of other versions, if it still wins; None: it must be found anew."""
        budget_s = min(recheck.seconds(old), deadline - self.runners.now())
        runner = self.runners(old.bucket.shape, self.seed)
        return recheck.revalidate(
            *(self.store, run, self.device, old, self.versions), runner=runner, budget_s=budget_s
        )

    def _tuned(
        self, run: int, bucket: Bucket, deadline: float
    ) -> tuple[Row | None, Measurement | None]:
        """The winner, or the measurement that leaves no hope of one; neither: no time.

        Plans that were too late for the clock are passed over where others beat the baseline.
        """
        now = self.runners.now()
        search, default, rival = self._search(bucket, now + SEARCH_SHARE * (deadline - now))
        duel: list[Measurement] = []
        untimed = [m for m in search if m.status == "timeout" and not (rival and m.late)]
        if default.status == "ok" and not untimed:
            if rival is None and not any(m.status == "error" for m in search):
                # Nothing can win: that is the verdict.
                search, duel = [m for m in search if m is not default], [default]
            else:  # where others failed, the baseline must show that the device was not the cause
                plans = [default.plan, rival] if rival else [default.plan]
                *before, duel = self._duels(bucket, plans, search, deadline)
                search = [*search, *(m for each in before for m in each)]
                default = duel[0]
        row = self.store.record(run, bucket, search, duel)
        failed = default.status in FAILED or default.late
        return row, default if failed else next((m for m in untimed if m.late), None)

    def _duels(
        self, bucket: Bucket, plans: list[Plan], search: list[Measurement], deadline: float
    ) -> list[list[Measurement]]:
        """The baseline and its rival alone; once more where GPU time, which no host is in, is not
        what it was in the search. The last one counts.
        """
        with self.runners.fresh(bucket.shape, self.seed) as alone:
            duel = self._measure(bucket, alone, plans, deadline, DUEL, plans[:1])
            if alone.queued and _disturbed(duel, search):
                again = self._measure(bucket, alone, plans, deadline, DUEL, plans[:1])
                if all(m.status == "ok" for m in again):
                    return [duel, again]
        return [duel]

    def _fail(self, bucket: Bucket, default: Measurement) -> BucketSkipped:
        """The baseline failed, and is stored so. The next bucket may do, unless nothing does any
        more.

        Raises:
            DeviceError: not even the smallest call works.
        """
        reason = f"{default.plan} itself failed: {default.message}"
        self.summary.failed.append((bucket, reason))
        skipped = BucketSkipped(bucket, reason, failed=True)
        self.tell(skipped)
        cause = self._death() if default.status == "error" else None
        if cause:
            raise DeviceError(
                f"{self.device.key} stopped working ({cause}); finished buckets are stored"
            )
        return skipped

    def _death(self) -> str | None:
        """Why not even a tiny call of `mlx` works on the device, in a process that has nothing to
        do with the failure; None if it does.
        """
        try:
            with self.runners.fresh(SIGN_OF_LIFE, self.seed) as runner:
                seconds, _ = runner.sample(MLX, 1)
        except Exception as error:  # whatever a device dies of
            return one_line(error)
        return None if math.isfinite(seconds) and seconds > 0 else f"the clock gave {seconds} s"

    def _pass_over(self, bucket: Bucket, reason: str, enough_s: float) -> BucketSkipped:
        self.summary.not_reached.append((bucket, reason))
        self.enough_s = self.enough_s or enough_s
        skipped = BucketSkipped(bucket, reason)
        self.tell(skipped)
        return skipped

    def _search(
        self, bucket: Bucket, deadline: float
    ) -> tuple[list[Measurement], Measurement, Plan | None]:
        """Measurements of the candidates, `mlx` first; that of the baseline among them, found in
        the first race; and the plan that should meet it again.
        """
        runner = self.runners(bucket.shape, self.seed)
        plans = candidates(bucket, self.device, self.backend)[1:]
        few = len(plans) <= EXHAUSTIVE
        proposals: Proposals = Grid(plans, self.seed)
        if not few:
            proposals = Tpe(plans, self.seed, patient=not runner.queued)
        measured: list[Measurement] = []

        def race(plans: list[Plan], effort: Effort) -> list[Measurement]:
            """With the baseline, until GPU time has shown where that stands."""
            known = default if runner.queued and _hopeless(default, first) else None
            racers = plans if known else [default.plan, *plans]
            found = self._measure(bucket, runner, racers, deadline, effort, [default.plan])
            return [_beside(known, each) for each in found] if known else found

        # `mlx` is measured even where it is alone; where it fails, another of MLX's stands in.
        racers = [MLX, *proposals.ask()]
        found = first = self._measure(bucket, runner, racers, deadline, SEARCH, MLX_PLANS)
        default = baseline(first) or first[0]
        leader: Measurement | None = None
        while found:
            measured += found
            proposals.tell(found)
            if any(m.status == "ok" and m.plan != default.plan for m in found):
                leader = finalist(found, default.plan)  # where all failed, the last one still leads
            best = [leader.plan] if leader else []
            failed = [m for m in found if m.plan == default.plan and m.status != "ok"]
            if failed or all(m.status == "error" for m in found):
                if not leader:  # nothing lost to a baseline that failed: no verdict
                    default = (failed or found)[0]
                break
            group = [plan for plan in proposals.ask() if plan not in best]
            found = race([*best, *group], SEARCH) if group else []
        if best and not few:  # those of different groups have not met
            found = race(_first(measured, default.plan), PLAYOFF)
            measured += found
            leader = finalist(found, default.plan) or leader
        return measured, default, leader.plan if leader else None

    def _measure(
        self,
        bucket: Bucket,
        runner: Runner,
        plans: list[Plan],
        deadline: float,
        effort: Effort,
        baselines: Sequence[Plan],
    ) -> list[Measurement]:
        found = measure(
            bucket.shape,
            plans,
            budget_s=deadline - self.runners.now(),
            seed=self.seed,
            runner=runner,
            progress=lambda measurement: self.tell(CandidateMeasured(bucket, measurement)),
            effort=effort,
            baselines=baselines,
        )
        self.summary.dropped += found[0].dropped
        self.summary.paused_s += found[0].paused_s
        return found


def _hopeless(default: Measurement, race: Sequence[Measurement]) -> bool:
    """Whether the baseline left its race at once, and others stayed in."""
    return default.rounds == 1 < max(m.rounds for m in race)


def _disturbed(duel: Sequence[Measurement], search: Sequence[Measurement]) -> bool:
    """Whether the rival's time in the duel has little to do with its latest one in the search."""
    known = {m.plan: m.median_us for m in search if m.status == "ok" and m.median_us}
    ratios = [m.median_us / known[m.plan] for m in duel[1:] if m.median_us and m.plan in known]
    return any(not 1 / DISTURBED < ratio < DISTURBED for ratio in ratios)


def _beside(default: Measurement, measurement: Measurement) -> Measurement:
    """Its speed-up over the baseline of an earlier race: the GPU's clock does not drift."""
    if not (default.median_us and measurement.median_us):
        return measurement
    return replace(measurement, ratio=default.median_us / measurement.median_us)


def _first(measured: Sequence[Measurement], default: Plan) -> list[Plan]:
    """The plans with the best ratio to the baseline in their last race."""
    ratios = {m.plan: m.ratio for m in measured if m.ratio is not None and m.plan != default}
    return sorted(ratios, key=ratios.__getitem__, reverse=True)[:PLAYERS]
