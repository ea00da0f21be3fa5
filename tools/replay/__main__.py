"""Replay lab: scores of the tuner and the policy, without the machines they are about.

    python -m tools.replay                     the table of docs/tuning.md; 1 if a target is missed
    python -m tools.replay record --out FILE   sweep every candidate on this machine

Run from the repository's root. Scoring uses a virtual clock: any machine gives the same figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mla_tuner.errors import BusyError

from . import devices, gating, noise, record, regret, verdicts
from .lab import Score
from .recording import load

RECORDINGS = Path(__file__).parent / "recordings"
RUNS = 1000
GAIN_RUNS = 200
# Powers of two of the contexts that are tuned twice: more candidates a bucket, fewer buckets.
FLIP_CONTEXTS = {"CPU": range(10, 18), "M4 Max": (10, 12, 14, 16, 17), "H200": (11, 14, 17)}
Job = tuple[Callable[..., list[Score]], tuple[object, ...]]


def table(scores: Sequence[Score]) -> str:
    """Markdown."""
    met = {True: "yes", False: "**no**", None: ""}
    lines = ["| figure | measured | target | met |", "|---|---|---|---|"]
    lines += [f"| {s.name} | {s.measured} | {s.target} | {met[s.met]} |" for s in scores]
    return "\n".join(lines)


def jobs(runs: int = RUNS) -> list[Job]:
    """Everything that is scored, in the table's order, in pieces that run side by side."""
    found: list[Job] = [(_equal, (name, runs)) for name in verdicts.WEATHERS]
    found += [(_gains, (name, GAIN_RUNS)) for name in verdicts.WEATHERS]
    found += [(_flips, (device, name)) for device in MACHINES for name in verdicts.WEATHERS]
    found += [(_budgets, (device,)) for device in MACHINES]
    found += [(_recorded, (path,)) for path in sorted(RECORDINGS.glob("*.json"))]
    found += [(_simulated, (device,)) for device in ("CPU", "M4 Max")]
    return [*found, (gating.scores, ())]


MACHINES: dict[str, Callable[[], devices.Hardware]] = {
    "CPU": devices.cpu,
    "M4 Max": lambda: devices.apple("M4 Max", 40),
    "H200": devices.h200,
}


def _equal(weather: str, runs: int) -> list[Score]:
    return [verdicts.equal(weather, verdicts.WEATHERS[weather], runs)]


def _gains(weather: str, runs: int) -> list[Score]:
    return [verdicts.gains(weather, verdicts.WEATHERS[weather], runs)]


def _flips(device: str, weather: str) -> list[Score]:
    buckets = verdicts.flip_buckets([1 << power for power in FLIP_CONTEXTS[device]])
    return [verdicts.flips(MACHINES[device](), weather, verdicts.WEATHERS[weather], buckets)]


def _budgets(device: str) -> list[Score]:
    return [verdicts.budgets(MACHINES[device](), (10, 30, 100, 300))]


def _recorded(path: Path) -> list[Score]:
    recording = load(path)
    name = f"recorded {path.stem}"
    return regret.scores(name, regret.recorded(recording))


def _simulated(device: str) -> list[Score]:
    hardware = MACHINES[device]()
    return regret.told(hardware.device.name, regret.simulated(hardware, noise.BUSY))


def _score() -> int:
    with ProcessPoolExecutor() as pool:
        running = [pool.submit(work, *arguments) for work, arguments in jobs()]
        scores = [score for job in running for score in job.result()]
    print(table(scores))
    return int(any(score.met is False for score in scores))


def _record(out: Path, budget_s: float, force: bool) -> int:
    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        recording = record.record(out, budget_s=budget_s, tell=tell, force=force)
    except (BusyError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out}: {len(recording.sweeps)} shapes")
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 where a target is missed or nothing could be recorded."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    recorder = commands.add_parser("record", help="sweep every candidate on this machine")
    recorder.add_argument("--out", type=Path, required=True, help="JSON; what it holds is kept")
    recorder.add_argument("--budget", type=float, default=400.0, help="seconds (default: 400)")
    recorder.add_argument("--force", action="store_true", help="though others use the machine")
    options = parser.parse_args(argv)
    if options.command == "record":
        return _record(options.out, options.budget, options.force)
    return _score()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
