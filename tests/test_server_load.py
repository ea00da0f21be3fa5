"""Many readers and writers at once: nobody sees an error, and nothing that was taken is lost.

`make test-share` keeps it up for a minute.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_tables import CPU, KERNEL, repeated, running, runs_in, table, token

from mla_tuner import share
from mla_tuner.server import client

pytest.importorskip("datasette", reason="datasette is not installed")

READERS, WRITERS, STRANGERS = 200, 10, 2
BUCKETS = 64  # that writers measure, one a push
FAMILY = f"/-/tuning/tables/{CPU.family}.json?kernel={KERNEL}"
PATHS = ("/-/tuning", FAMILY, "/shared/evidence.json?_size=5", "/-/tuning.json", "/shared/failures")


class Load:
    """A server under load: what it answered, and what it took."""

    def __init__(self, url: str, first: share.SharedTable, token: str) -> None:
        self.url, self.first, self.token = url, first, token
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.taken: list[str] = []
        self.slowest_s = 0.0

    async def ask(self, method: str, path: str, body: str = "") -> bytes:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        begun = time.monotonic()
        head = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = await reader.read(-1)
        writer.close()
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        status = int(answer.split(None, 2)[1])
        self.statuses[method, status] += 1
        return answer.partition(b"\r\n\r\n")[2]

    async def read(self, turns: Iterator[int]) -> None:
        for turn in turns:
            assert await self.ask("GET", PATHS[turn % len(PATHS)])

    async def intrude(self, turns: Iterator[int]) -> None:
        for _ in turns:
            await self.ask("POST", "/-/tuning/push", share.render(self.first))

    def write(self, number: int, turns: Iterator[int]) -> None:
        for turn in turns:
            made = repeated(self.first, number * 1_000_000 + turn, turn % BUCKETS)
            answer = client.send(self.url, share.render(made), self.token, timeout_s=60)
            assert answer == {"new": 1, "known": 0}
            self.taken += runs_in(made)

    async def run(self, turns: int, seconds: float) -> None:
        until = time.monotonic() + seconds

        def counted(first: int) -> Iterator[int]:
            turn = first
            while turn < first + turns or time.monotonic() < until:
                yield turn
                turn += 1

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(WRITERS) as pool:
            writers = [
                loop.run_in_executor(pool, self.write, number, counted(0))
                for number in range(WRITERS)
            ]
            await asyncio.gather(
                *writers,
                *(self.read(counted(number)) for number in range(READERS)),
                *(self.intrude(counted(0)) for _ in range(STRANGERS)),
            )


@pytest.mark.parametrize(
    ("turns", "seconds"), [(2, 0), pytest.param(2, 60, marks=pytest.mark.slow)]
)
def test_nothing_fails_and_nothing_is_lost(tmp_path: Path, turns: int, seconds: float) -> None:
    first = table(tmp_path, 8192)
    with running(tmp_path) as url:
        load = Load(url, first, token())
        client.send(url, share.render(first), load.token)
        asyncio.run(load.run(turns, seconds))
        left = share.load(client.fetch(url, CPU.family, KERNEL), "the answer")
    print(dict(load.statuses), f"{len(load.taken)} pushes, slowest {load.slowest_s:.2f} s")
    assert set(load.statuses) == {("GET", 200), ("POST", 403)}
    assert load.statuses["GET", 200] >= READERS * turns
    assert len(load.taken) >= WRITERS * turns
    assert runs_in(left) == {*load.taken, *runs_in(first)}
    assert sum(len(each.evidence) for each in left.devices[0].buckets) == len(load.taken) + 1
    assert json.loads(share.render(left)) == json.loads(share.render(share.merged(left, first)))
