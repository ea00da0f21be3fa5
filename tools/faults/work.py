"""What the processes under fire do: the real tuner, policy and store on a simulated device."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

from mla_tuner import schema
from mla_tuner.errors import StoreError
from mla_tuner.policy import Policy
from mla_tuner.shapes import Bucket
from mla_tuner.store import Store
from mla_tuner.table import read_rows
from mla_tuner.tuner import BucketTuned, Event, default_buckets, tune
from tools.replay import devices
from tools.replay.noise import QUIET
from tools.replay.simulate import SimRunners, stage

HARDWARE = devices.cpu()
# Between two `db rebuild` a process starts. SQLite's waiters don't queue, they look every 0.1 s:
# who took the long transaction again at once would starve them, and no command does.
START_S = 0.15
CONTEXTS = (1024, 2048, 4096, 8192)


def buckets_of(heads: Sequence[int]) -> list[Bucket]:
    """What one process tunes; different heads never meet in a bucket."""
    return default_buckets(CONTEXTS, (1, 2), heads, ("bfloat16",))


def tune_buckets(path: str, heads: Sequence[int], seed: int, finished: str) -> None:
    """Tune to the end, resuming; each bucket goes to the file `finished` once it is stored."""
    log = os.open(finished, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: Event) -> None:
        if isinstance(event, BucketTuned):
            os.write(log, f"{tuple(event.bucket)}\n".encode())

    runners = SimRunners(HARDWARE.seconds, QUIET, seed=seed)
    with stage(devices.SimBackend(HARDWARE)), Store(path) as store:
        wanted = buckets_of(heads)
        done = tune(
            *(store, HARDWARE.device, wanted),
            budget_s=1e9,
            runners=runners,
            seed=seed,
            progress=note,
        )
        assert len(done.tuned) + len(done.skipped_known) == len(wanted), done
    os.close(log)


def serve(path: str, stop: str) -> None:
    """Load policies until the file `stop` is there; what was seen once is never gone again."""
    logging.disable(logging.WARNING)  # what a file lacks before its tables are made, every time
    seen = 0
    for _ in until(stop):
        policy = Policy(
            HARDWARE.device,
            read_rows(Path(path), HARDWARE.device) if Path(path).exists() else (),
            backend=devices.SimBackend(HARDWARE),
        )
        assert len(policy) >= seen, f"{len(policy)} winners after {seen}"
        seen = len(policy)


def look(path: str, stop: str) -> None:
    """Check and list, as `db check` does; before there are tables, the line that says so."""
    early = ("no database at", "holds no tuning data", "has schema 1")
    for _ in until(stop):
        try:
            with Store(path, create=False) as store:
                found = store.check()
                assert found["ok"], found
                store.plans()
        except StoreError as error:
            if not any(text in str(error) for text in early):
                raise


def rebuild(path: str, stop: str) -> None:
    """Derive everything anew, again and again; also a way to create and to migrate."""
    for _ in until(stop):
        with Store(path) as store:
            store.rebuild()
        time.sleep(START_S)


def until(stop: str) -> Iterator[int]:
    """Rounds of work, at least three, until a file is there, or nobody is left to put it there."""
    parent = multiprocessing.parent_process()
    for turn in count():
        if turn >= 3 and (Path(stop).exists() or not (parent and parent.is_alive())):
            return
        yield turn


def make_version_1(path: Path) -> None:
    """An empty database as the first release left it, to be migrated by whoever opens it first."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE _sqlite_migrations (id INTEGER PRIMARY KEY, migration_set TEXT, "
            "name TEXT, applied_at TEXT)"
        )
        connection.execute(
            "INSERT INTO _sqlite_migrations VALUES (1, 'mla_tuner', 'create_tables', '')"
        )
        for statement in schema.VERSION_1:
            connection.execute(statement)
        connection.commit()
