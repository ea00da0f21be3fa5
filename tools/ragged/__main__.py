"""Regret of the ways to look up a batch of unequal contexts, as a Markdown table.

    python -m tools.ragged [--seconds N] [--json FILE]

Each way names a bucket, that is a batch of equal contexts. The plan that is best there runs the
unequal batch; its regret is how much longer that takes than the best plan of all. Measured on this
machine's CPU kernel, and modelled for GPUs of 8 to 132 cores. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from mla_tuner import backends
from mla_tuner.candidates import MIN_GAIN, candidates
from mla_tuner.evidence import TIE, percentile, plainness
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape, pieces
from tools.replay import devices

from .batches import RULES, batches
from .times import Found, Times, measure, modelled

SECONDS = 180.0
MEASURED = ((16384, 16), (1024, 128))  # longest context, heads
MEASURED_SEQUENCES = 8  # two cores are busy long before that
PARTITIONS = (2, 3, 4, 6, 8)
ENOUGH = 0.5  # of the samples undisturbed: with fewer the scheduler was measured, not the plans
MODELLED_SEQUENCES = 16
MODELLED = tuple((context, heads) for context in (8192, 32768, 131072) for heads in (16, 128))
CHIPS = {
    "2 cores": (("CPU", 2),),
    "8-20 cores": (("M1", 8), ("M4", 10), ("M2 Pro", 19), ("M4 Pro", 20)),
    "40-80 cores": (("M4 Max", 40), ("M2 Ultra", 60), ("M3 Ultra", 80)),
    "132 cores": (("H200", 132),),
}


@dataclass(frozen=True)
class Machine:
    """Seconds of a call, in any unit that is the same for all plans of a shape; and those plans."""

    seconds: Callable[[Shape, Plan], float]
    plans: Callable[[Shape], Sequence[Plan]]

    def times(self, shape: Shape) -> Times:
        return {plan: self.seconds(shape, plan) for plan in self.plans(shape)}


@dataclass(frozen=True)
class Answer:
    """The plan that a rule ran for a batch, and how much longer that took than the best one."""

    rule: str
    mix: str
    context: int
    heads: int
    bucket: str
    plan: str
    best: str
    regret: float


def stored(times: Times) -> Plan:
    """The plan that a tuned table would hold: the plainest of the fastest, or `mlx`."""
    fastest = min(times.values())
    if MLX in times and times[MLX] < MIN_GAIN * fastest:
        return MLX
    return min((p for p in times if times[p] <= TIE * fastest), key=plainness)


def answers(machine: Machine, asked: Iterable[tuple[str, Shape]]) -> Iterator[Answer]:
    """Every rule's answer for each batch."""
    table: dict[Shape, Plan] = {}
    for mix, shape in asked:
        times = machine.times(shape)
        best = min(times, key=times.__getitem__)
        for rule in RULES:
            equal = rule.bucket(shape).shape
            if equal not in table:
                table[equal] = stored(machine.times(equal))
            plan = rule.plan(table[equal], shape, times)
            regret = max(0.0, machine.seconds(shape, plan) / times[best] - 1)
            yield Answer(
                rule.name, mix, shape.context, shape.heads, str(equal), str(plan), str(best), regret
            )


def measured(seconds: float) -> tuple[list[Answer], Found]:
    """On this machine's CPU, and the times behind it. MLX's own paths take over 30 times as long
    there (docs/performance-cpu.md): they are neither best nor stored, and not timed.
    """
    backend = backends.get("cpu")

    def plans(shape: Shape) -> list[Plan]:
        counts = [p for p in PARTITIONS if pieces(shape.context, p) == p]
        return [
            plan
            for tile in backend.tiles(shape)
            for plan in (Plan("single", 1, tile), *(Plan("split", p, tile) for p in counts))
        ]

    asked = list(batches(MEASURED, MEASURED_SEQUENCES))
    unequal = [shape for _, shape in asked]
    equal = {rule.bucket(shape).shape for shape in unequal for rule in RULES}
    found = measure([*unequal, *equal], plans, seconds)
    machine = Machine(lambda shape, plan: found.times[shape][plan], plans)
    return list(answers(machine, asked)), found


def simulated(chip: str, cores: int) -> list[Answer]:
    """On a simulated device."""
    others = {"CPU": devices.cpu, "H200": devices.h200}
    hardware = others[chip]() if chip in others else devices.apple(chip, cores)
    backend = devices.SimBackend(hardware)

    def plans(shape: Shape) -> list[Plan]:
        """Those of equal sequences; for unequal ones also those of one, that they leave alone."""
        exact = shape.bucket._replace(context=shape.context)
        batches = {1, shape.batch} if shape.lengths else {shape.batch}
        each = (candidates(exact._replace(batch=n), hardware.device, backend) for n in batches)
        return list(dict.fromkeys(plan for found in each for plan in found))

    machine = Machine(lambda shape, plan: modelled(hardware, shape, plan), plans)
    return list(answers(machine, batches(MODELLED, MODELLED_SEQUENCES)))


def title(found: Found) -> str:
    """Of the measured column; says so where it proves nothing."""
    return "CPU, measured" + ("" if found.undisturbed >= ENOUGH else " (disturbed: not judged)")


def markdown(found: dict[str, list[Answer]]) -> str:
    """Mean, 95th percentile and maximum of the regret in percent: a row for each rule."""
    lines = ["| looked up by | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for rule in RULES:
        cells = [
            _cell([a.regret for a in group if a.rule == rule.name]) for group in found.values()
        ]
        lines.append(f"| {rule.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(regrets: Sequence[float]) -> str:
    three = mean(regrets), percentile(regrets, 0.95), max(regrets)
    return " / ".join(f"{100 * value:.1f}" for value in three)


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 without the CPU kernel."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.ragged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to measure (default: 180)")
    parser.add_argument("--json", type=Path, help="write every answer there")
    options = parser.parse_args(argv)
    built, reason = backends.get("cpu").available()
    if not built:
        print(reason, file=sys.stderr)
        return 1
    here, timed = measured(options.seconds)
    print(f"CPU: {timed.rounds} rounds, {timed.undisturbed:.0%} of the samples undisturbed\n")
    found = {title(timed): here}
    with ProcessPoolExecutor() as pool:
        running = {
            f"{name}, modelled": [pool.submit(simulated, *chip) for chip in chips]
            for name, chips in CHIPS.items()
        }
        for name, jobs in running.items():
            found[name] = [answer for job in jobs for answer in job.result()]
    print(markdown(found))
    if options.json:
        whole = {name: [asdict(answer) for answer in group] for name, group in found.items()}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
