"""Kills and crowds, and what has to be true afterwards."""

from __future__ import annotations

import ast
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mla_tuner.shapes import Bucket
from mla_tuner.store import Store

from . import work

# Neither a fork of a process whose threads are busy, nor the imports anew for every kill.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tools.faults.work"])
HEADS = (8, 16, 32, 64, 128)  # 40 buckets a run
KILLS_EACH = 8  # of one database, at most
WAIT_S = 600.0


@dataclass
class Kills:
    """What a series of kills did. `lost` are buckets that were finished, and gone afterwards."""

    kills: int = 0
    databases: int = 0
    migrating: int = 0  # databases that began as version 1
    lost: int = 0
    damaged: int = 0
    seconds: float = 0.0


def kill_runs(folder: Path, kills: int, seed: int = 0, heads: tuple[int, ...] = HEADS) -> Kills:
    """Kill a tuning run at a random moment, look, let the next one resume; until `kills` are done.

    A database is used until its run got through, then the next one begins, every other one with the
    tables of version 1. The last run of each must complete, whatever was killed before.
    """
    rng, found, began = random.Random(seed), Kills(), time.monotonic()
    length = _through((str(folder / "0.db"), heads, seed, str(folder / "0.log")))
    while found.kills < kills:
        found.databases += 1
        path, log = folder / f"{found.databases}.db", folder / f"{found.databases}.log"
        if found.databases % 2 == 0:
            work.make_version_1(path)
            found.migrating += 1
        run = (str(path), heads, seed, str(log))
        for _ in range(1 + rng.randrange(KILLS_EACH)):
            left = 1 - len(_finished(log)) / len(work.buckets_of(heads))
            if found.kills == kills or not _killed(run, rng.uniform(0.0, length * left)):
                break
            found.kills += 1
            _look(path, log, found)
        left = 1 - len(_finished(log)) / len(work.buckets_of(heads))
        seconds = _through(run)
        length = seconds / left if left > 0.5 else length  # the machine's load changes
        _look(path, log, found)
        _complete(path, found, heads)
    found.seconds = time.monotonic() - began
    return found


def _killed(run: tuple[Any, ...], wait_s: float) -> bool:
    """Whether a tuning run was still at work when it was killed."""
    process = _start(work.tune_buckets, *run)
    process.join(wait_s)
    process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a tuning run ended with {process.exitcode} before it was killed")
    return process.exitcode != 0


def _through(run: tuple[Any, ...]) -> float:
    """Seconds of a run that nobody kills."""
    began = time.monotonic()
    process = _start(work.tune_buckets, *run)
    _wait([process])
    if process.exitcode:
        raise RuntimeError(f"a run that nobody killed ended with {process.exitcode}")
    return time.monotonic() - began


def _look(path: Path, log: Path, found: Kills) -> None:
    finished = _finished(log)
    if not path.exists():
        found.lost += len(finished)
        return
    with Store(path) as store:
        found.damaged += not store.check()["ok"]
        found.lost += len(finished - {row.bucket for row in store.plans()})


def _finished(log: Path) -> set[Bucket]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {Bucket(*ast.literal_eval(line)) for line in lines}


def _complete(path: Path, found: Kills, heads: tuple[int, ...]) -> None:
    """A resumed run has everything, and the winners still follow from the evidence."""
    with Store(path) as store:
        plans = store.plans()
        found.lost += len(set(work.buckets_of(heads)) - {row.bucket for row in plans})
        store.rebuild()
        found.damaged += store.plans() != plans


@dataclass
class Crowd:
    """What many processes at once left. `errors`: those that ended with anything but 0."""

    processes: int
    errors: int
    plans: int
    expected: int
    sound: bool
    seconds: float


def crowd(folder: Path, processes: int, *, version_1: bool = False) -> Crowd:
    """Tune, read, check, rebuild and migrate one fresh database, all at the same moment.

    Half of the processes tune, each its own heads; the others go on until those are done.
    """
    path, stop = folder / "crowd.db", folder / "stop"
    if version_1:
        work.make_version_1(path)
    tuners = max(1, processes // 2)
    began = time.monotonic()
    tuning = [
        _start(work.tune_buckets, str(path), (i + 1,), i, str(folder / f"{i}.log"))
        for i in range(tuners)
    ]
    jobs: tuple[Callable[..., None], ...] = (work.serve, work.look, work.rebuild)
    others = [_start(jobs[i % 3], str(path), str(stop)) for i in range(processes - tuners)]
    _wait(tuning)
    stop.touch()
    _wait(others)
    with Store(path) as store:
        return Crowd(
            processes=processes,
            errors=sum(process.exitcode != 0 for process in [*tuning, *others]),
            plans=len(store.plans()),
            expected=sum(len(work.buckets_of((i + 1,))) for i in range(tuners)),
            sound=bool(store.check()["ok"]),
            seconds=time.monotonic() - began,
        )


def _start(target: Callable[..., None], *args: Any) -> BaseProcess:
    process = SERVER.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _wait(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join()
