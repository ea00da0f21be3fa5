"""`python -m tools.faults`: kills and crowds, as a table. Exit code 1 where anything was lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from mla_tuner.table import SCHEMA_VERSION

from .fire import crowd, kill_runs


def main() -> int:
    """Run what was asked for in a temporary folder; one line each."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs of tuning runs")
    parser.add_argument("--processes", type=int, default=8, help="at once on one fresh database")
    parser.add_argument("--crowds", type=int, default=10, help="fresh databases for them")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        if options.kills:
            done = kill_runs(Path(folder), options.kills, options.seed)
            good &= not (done.lost or done.damaged)
            print(
                f"{done.kills} kills of running tuners on {done.databases} databases "
                f"({done.migrating} of version 1): {done.lost} finished buckets lost, "
                f"{done.damaged} files damaged, every resumed run completed; {done.seconds:.0f} s"
            )
        for number in range(options.crowds):
            place = Path(folder) / f"crowd{number}"
            place.mkdir()
            found = crowd(place, options.processes, version_1=number % 2 == 1)
            good &= found.sound and not found.errors and found.plans == found.expected
            print(
                f"{found.processes} processes on a fresh database of version "
                f"{1 if number % 2 else SCHEMA_VERSION}: {found.errors} errors, {found.plans} of "
                f"{found.expected} winners, {'sound' if found.sound else 'damaged'}; "
                f"{found.seconds:.0f} s"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
