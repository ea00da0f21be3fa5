"""A simulated machine of a fleet, as a process: `mla-tune` with a device of known times.

    python fleet_machine.py FOLDER URL SECONDS COUNT

tunes so many buckets, of one context and 1, 2, .. heads, into FOLDER/tuning.db. Each takes SECONDS
of real time, in which FOLDER/busy tells how many it tuned before, and the heads. It makes
FOLDER/ready, begins when there is a file `go` beside FOLDER, and writes what it did to
FOLDER/answer.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes import FakeBackend, FakeRunner, FakeRunners, make_device

from mla_tuner import backends, fleet, fleet_study
from mla_tuner.errors import TunerError
from mla_tuner.plan import MLX
from mla_tuner.shapes import Shape
from mla_tuner.store import Store
from mla_tuner.tuner import default_buckets


class SlowRunners(FakeRunners):
    """Each final duel takes a while of real time: a bucket has one."""

    def __init__(self, folder: Path, latency_s: float) -> None:
        super().__init__(lambda shape, plan: 9e-3 if plan == MLX else 1e-3 / plan.partitions)
        self.busy, self.latency_s = folder / "busy", latency_s

    @contextmanager
    def fresh(self, shape: Shape, seed: int) -> Iterator[FakeRunner]:
        self.busy.write_text(f"{len(self.duels)} {shape.heads}")
        time.sleep(self.latency_s)
        with super().fresh(shape, seed) as runner:
            yield runner
        self.busy.unlink()


def hurry() -> None:
    """Waits of a fleet that suit a test."""
    fleet_study.HEARTBEAT_S, fleet_study.GRACE_S = 1, 3
    fleet_study.RETRY_S = fleet.POLL_S = 0.05


def main(folder: Path, url: str, latency_s: float, count: int) -> None:
    hurry()
    tempfile.tempdir = str(folder)  # the lock of this machine alone
    backends.get = lambda name: FakeBackend()  # type: ignore[assignment]
    grid = default_buckets([1024], [1], range(1, count + 1), ["bfloat16"])
    (folder / "ready").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
    with Store(folder / "tuning.db") as store:
        started = time.time()
        summary = fleet.tune(
            *(url, store, make_device(4), grid),
            budget_s=1e9,
            note=print,
            runners=SlowRunners(folder, latency_s),
        )
    answer = {
        "started": started,
        "ended": time.time(),
        "tuned": [list(row.bucket) for row in summary.tuned],
        "not_reached": [reason for _, reason in summary.not_reached],
    }
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    except TunerError as error:
        sys.exit(f"Error: {error}")
