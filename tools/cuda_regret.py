"""What the tuned table costs on shapes off its grid: `python -m tools.cuda_regret --db FILE`.

Every path, tile and partition count is timed on each shape, side by side, by the tuner's own
stopwatch. The best of them, what the policy decides from the table, and MLX's paths meet once more,
for fresh samples. Regret is time(decided) / time(best) - 1; where the decision comes from the table
it counts for the mean. A plan is slower than MLX's better path if the interval of the paired times
lies above 1.

A plan that is wrong on a shape is named and left out, as the tuner does.

Exits with 0 if the mean is at most 2 % and no decision is slower than MLX's better path; with 1 if
not, or if a decided plan is wrong, a kernel fails its proof, or the table has no say.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from mla_tuner import backends, device
from mla_tuner.answers import short
from mla_tuner.backends import Backend
from mla_tuner.device import Device
from mla_tuner.evidence import MIN_ROUNDS, Measurement, median_interval, paired
from mla_tuner.live import LiveRunners
from mla_tuner.measure import Effort, Runner, machine_lock, measure
from mla_tuner.plan import MLX_PLANS, Decision, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import MAX_PARTITIONS, Shape, pieces

# Context, batch, heads. Where the batch is no power of two it is off the grid, too; 40 heads are in
# no table, and show what the policy makes of that.
SHAPES = (
    *(Shape(3072, 1, 16), Shape(5000, 3, 8), Shape(5000, 24, 128), Shape(11000, 6, 16, "float16")),
    *(Shape(11000, 1, 40), Shape(24576, 12, 20), Shape(24576, 1, 128), Shape(50000, 3, 32)),
    *(Shape(50000, 6, 64), Shape(100000, 1, 20, "float16"), Shape(100000, 12, 16)),
    *(Shape(180000, 1, 8), Shape(180000, 3, 64)),
)
TARGET = 0.02
FROM_TABLE = ("tuned", "fitted")
# Finds the best: losers leave by rank, `mlx` at once where it is hopeless.
SWEEP = Effort(settled=2, most=15, ranked=True, brief=0.005)
# As many rounds for each: no plan leaves before there is an interval.
FINAL = Effort(settled=MIN_ROUNDS, most=41, seconds=1.5, least=12)
FINALISTS = 4


@dataclass(frozen=True)
class Result:
    """What the table costs on one shape. Times in microseconds."""

    shape: str
    source: str
    decided: str
    best: str
    decided_us: float
    best_us: float
    mlx_us: float  # of MLX's better path
    regret: float
    slower: bool  # than that path, for sure
    plans: int
    seconds: float
    wrong: tuple[str, ...] = ()  # plans that the tuner would refuse here, and why


class WrongError(Exception):
    """A decided plan gave a wrong result, one failed, or one was not timed."""


def plans_of(shape: Shape, backend: Backend) -> Iterator[Plan]:
    """MLX's paths, then every useful tile with every count that the context can be cut in."""
    for plan in MLX_PLANS:
        if backend.refusal(plan, shape) is None:
            yield plan
    for tile in backend.tiles(shape):
        yield Plan("single", 1, tile)
        for count in range(2, MAX_PARTITIONS + 1):
            if pieces(shape.context, count) == count:
                yield Plan("split", count, tile)


def exact(decision: Decision, shape: Shape, backend: Backend) -> Plan:
    """What runs for a decision: its plan may be cut in fewer pieces, and leave the tile open."""
    plan = decision.plan.cut(shape.context)
    if plan.native and not plan.tile:
        return Plan(plan.path, plan.partitions, backend.tiles(shape)[0])
    return plan


def timed(
    shape: Shape, plans: Sequence[Plan], runner: Runner, effort: Effort, budget_s: float
) -> tuple[list[Measurement], dict[Plan, str]]:
    """Those that were timed, and what is wrong with others.

    Raises WrongError where a plan of ours failed, or there was no time for one.
    """
    found = measure(shape, plans, budget_s=budget_s, runner=runner, effort=effort)
    for each in found:
        if each.status == "timeout":
            raise WrongError(f"{short(shape)} {each.plan}: {each.message}: give a longer --budget")
        if each.plan.native and each.status == "error":
            raise WrongError(f"{short(shape)} {each.plan}: {each.message}")
    wrong = {each.plan: each.message for each in found if each.status == "wrong"}
    return [each for each in found if each.status == "ok"], wrong


def result(
    shape: Shape, decision: Decision, backend: Backend, runner: Runner, budget_s: float
) -> Result:
    """Sweeps a shape, and lets what counts meet once more."""
    started, plans = runner.now(), list(plans_of(shape, backend))
    swept, wrong = timed(shape, plans, runner, SWEEP, 0.8 * budget_s)
    swept.sort(key=lambda each: each.median_us or 0.0)
    decided = exact(decision, shape, backend)
    if decided in wrong:
        raise WrongError(f"{short(shape)} {decided}: {wrong[decided]}")
    mlx = [each.plan for each in swept if not each.plan.native]
    finalists = dict.fromkeys([decided, *mlx[:1], *(each.plan for each in swept[:FINALISTS])])
    final, also = timed(shape, list(finalists), runner, FINAL, 0.2 * budget_s)
    found = judged(shape, decision, decided, final, len(plans), runner.now() - started)
    return replace(found, wrong=tuple(f"{plan}: {why}" for plan, why in (wrong | also).items()))


def judged(
    shape: Shape,
    decision: Decision,
    decided: Plan,
    final: Sequence[Measurement],
    plans: int,
    seconds: float,
) -> Result:
    """What the last race says. Raises WrongError where the decision or MLX was not timed in it."""
    by_plan = {each.plan: each for each in final}
    ours = by_plan.get(decided)
    theirs = [each for each in final if not each.plan.native]
    if ours is None or not theirs:
        raise WrongError(f"{short(shape)}: {decided} or MLX was not timed")
    longest = max(each.rounds for each in final)
    best = min((each for each in final if each.rounds == longest), key=_median)
    mlx = min(theirs, key=_median)
    regret = median(paired(ours.samples_us, best.samples_us)) - 1
    against_mlx = median_interval(paired(ours.samples_us, mlx.samples_us))
    slower = ours is not mlx and against_mlx is not None and against_mlx[0] > 1
    return Result(
        *(short(shape), decision.source, str(decided), str(best.plan)),
        *(_median(ours), _median(best), _median(mlx), regret),
        slower=slower,
        plans=plans,
        seconds=seconds,
    )


def _median(each: Measurement) -> float:
    return each.median_us or 0.0


def verdict(results: Sequence[Result]) -> tuple[float | None, list[str]]:
    """Mean regret of the decisions that come from the table, and what is not as it should be."""
    regrets = [each.regret for each in results if each.source in FROM_TABLE]
    average = mean(regrets) if regrets else None
    found = [f"{each.shape}: {each.decided} is slower than MLX" for each in results if each.slower]
    if average is None:
        return None, ["no decision comes from the table", *found]
    if average > TARGET:
        found.insert(0, f"the mean regret is {average:.1%}, more than {TARGET:.0%}")
    return average, found


def report(results: Sequence[Result], clock: str) -> Iterator[str]:
    """The lines of the answer, a Markdown table first."""
    yield f"Times of a call in us, {clock}."
    yield ""
    yield "| shape | source | decided | best | decided, us | best, us | MLX, us | regret |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in results:
        times = " | ".join(f"{t:.1f}" for t in (each.decided_us, each.best_us, each.mlx_us))
        mark = " SLOWER THAN MLX" if each.slower else ""
        names = f"{each.shape} | {each.source} | {each.decided} | {each.best}"
        yield f"| {names} | {times} | {each.regret:.1%}{mark} |"
    average, problems = verdict(results)
    yield ""
    if average is not None:
        count = sum(each.source in FROM_TABLE for each in results)
        yield f"Mean regret of {count} decisions from the table: {average:.2%}."
    yield from problems or ["None is slower than MLX's better path."]
    for each in results:
        yield from (f"Left out, {each.shape} {line}." for line in each.wrong)


def compile_all(shapes: Sequence[Shape], backend: Backend) -> float:
    """Seconds that it took. Raises WrongError where a kernel gives no right answer here."""
    started = time.perf_counter()
    for shape in shapes:
        for tile in backend.tiles(shape):
            for plan in (Plan("single", 1, tile), Plan("split", 2, tile)):
                right, reason = backend.proof(plan, shape)
                if not right:
                    raise WrongError(reason)
    return time.perf_counter() - started


def run(here: Device, db: Path, shapes: Sequence[Shape], budget_s: float) -> list[Result]:
    """All shapes in turn, each with its share of what is left of the budget."""
    runners, found = LiveRunners(here), []  # first: it sets how MLX queues
    backend, policy = backends.get(here.backend), Policy.load(db, here)
    with machine_lock():
        compiled_s = compile_all(shapes, backend)
        print(f"all kernels compiled and proven in {compiled_s:.1f} s", file=sys.stderr)
        deadline = runners.now() + budget_s
        for left, shape in zip(range(len(shapes), 0, -1), shapes, strict=True):
            decision = policy.decide(shape.context, shape.batch, shape.heads, shape.dtype)
            budget = (deadline - runners.now()) / left
            found.append(result(shape, decision, backend, runners(shape, 0), budget))
            last = found[-1]
            print(f"{last.shape}: {last.plans} plans, {last.seconds:.1f} s", file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path, required=True, help="the table that the policy reads")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda", "metal"))
    parser.add_argument(
        "--budget",
        type=float,
        default=85.0,
        help="seconds for all shapes, those of compilation not counted",
    )
    parser.add_argument("--only", default="", help="shapes whose text holds this, as `b1 h16`")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(argv)
    shapes = [shape for shape in SHAPES if options.only in short(shape)]
    if not shapes:
        parser.error(f"no shape holds {options.only!r}")
    here, started = device.probe(options.device), time.perf_counter()
    able, reason = backends.get(here.backend).available()
    if not able:
        print(f"the kernels can't run: {reason}")
        return 1
    device.use(here)
    try:
        results = run(here, options.db, shapes, options.budget)
    except WrongError as error:
        print(error)
        return 1
    clock = "GPU time with the queue full" if LiveRunners(here).clock else "wall clock"
    print("\n".join(report(results, clock)))
    print(f"{time.perf_counter() - started:.0f} s, compilation included.")
    if options.json:
        rows = [vars(each) for each in results]
        software = {"device": here.key, "name": here.name, "clock": clock, **device.software()}
        options.json.write_text(json.dumps({**software, "results": rows}, indent=1) + "\n")
    return 1 if verdict(results)[1] else 0


if __name__ == "__main__":
    sys.exit(main())
