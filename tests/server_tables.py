"""Tables of a simulated CPU, and servers of them, for the tests of a team's server."""

from __future__ import annotations

import asyncio
import html
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from mla_tuner import share
from mla_tuner.device import Device
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.server.client import PLACE
from mla_tuner.shapes import Shape
from mla_tuner.share_format import SharedRun, run_id, settled
from mla_tuner.store import Store

KERNEL = "0123456789abcdef"
CPU = Device("cpu", "x86_64-avx2", "x86_64-avx2", 2, 24, "test CPU", 32 << 20)
SECRET = "0123456789abcdef" * 4
PUSH = f"{PLACE}/push"
SPLIT = Plan("split", 4, "r16")
_SOFTWARE = {"mla_tuner": "0.1.0", "mlx": "0.32.4", "os": "Linux 6", "system": "Linux 6"}


def fill(
    path: Path,
    contexts: Iterable[int] = (1024, 8192),
    *,
    speedup: float = 3.0,
    plan: Plan = SPLIT,
    device: Device = CPU,
    kernel: str = KERNEL,
) -> Path:
    """A database with a run that found `plan` faster by `speedup`: another one, another run."""
    with Store(path) as store:
        options = {"budget_s": 60.0, "seed": 0}
        told = {"software": _SOFTWARE, "options": options, "conditions": {"clock": "wall"}}
        run = store.start_run(device, kernel=kernel, **told)
        for context in contexts:
            shape = Shape(context, 1, 16)
            us = tuple(90.0 + each for each in range(9))
            duel = [
                _timed(shape, MLX, tuple(each * speedup for each in us), 1.0),
                _timed(shape, plan, us, speedup),
            ]
            store.record(run, shape.bucket, duel, duel)
    return path


def _timed(shape: Shape, plan: Plan, us: tuple[float, ...], ratio: float) -> Measurement:
    spread = (us[4], us[0], us[-1])
    interval = (ratio * 0.99, ratio * 1.01) if ratio != 1 else (1.0, 1.0)
    return Measurement(shape, plan, "ok", "", 1e-3, len(us), *spread, ratio, *interval, us)


def table(folder: Path, *contexts: int, **how: Any) -> share.SharedTable:
    """What such a database shares: the same for the same arguments, in one folder."""
    path = folder / f"{sha256(repr((contexts, how)).encode()).hexdigest()}.db"
    if not path.exists():
        fill(path, contexts or (1024, 8192), **how)
    with Store(path) as store:
        (found,) = share.tables(store)
    return found


def repeated(table: share.SharedTable, number: int, more_heads: int = 0) -> share.SharedTable:
    """What another run with the same times, of more heads perhaps, would share."""
    (device,) = table.devices
    (run,) = device.runs
    told = {**run.model_dump(), "nonce": f"{number:016x}"}
    told["id"] = run_id(device.versions, told)
    evidence = {
        each.bucket._replace(heads=each.heads + more_heads): [
            entry.model_copy(update={"run": told["id"]}) for entry in each.evidence
        ]
        for each in device.buckets
    }
    made = settled(device.facts, [SharedRun.model_validate(told)], evidence)
    assert made is not None
    return table.model_copy(update={"devices": (made,)})


def runs_in(table: share.SharedTable) -> set[str]:
    return {run.id for device in table.devices for run in device.runs}


class Server:
    """A server in this process, asked without a network."""

    def __init__(self, path: Path, secret: str | None = SECRET) -> None:
        from mla_tuner.server import app

        self.path = path
        self.datasette = app.application(path, secret)

    def __call__(self, job: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            await self.datasette.invoke_startup()
            return await job(self.datasette)

        return asyncio.run(run())

    def get(self, path: str) -> Any:
        return self(lambda datasette: datasette.client.get(path))

    def post(self, path: str, content: str | bytes, token: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self(lambda datasette: datasette.client.post(path, content=content, headers=headers))

    def token(self, **restrictions: Any) -> str:
        return str(self(lambda datasette: datasette.create_token("alice", **restrictions)))

    def push(self, *tables: share.SharedTable) -> list[dict[str, int]]:
        token = self.token()
        answers = [self.post(PUSH, share.render(each), token) for each in tables]
        assert [each.status_code for each in answers] == [200] * len(tables)
        return [each.json() for each in answers]


def links(page: str, part: str) -> list[str]:
    """Addresses of a kind that a page leads to."""
    return [html.unescape(each) for each in re.findall(rf'href="(/-/tuning/{part}[^"]*)"', page)]


@contextmanager
def running(folder: Path, end: int = signal.SIGTERM) -> Iterator[str]:
    """The address of a server in a process of its own that takes tables; it ends in peace."""
    command = [sys.executable, "-m", "mla_tuner", "share", "serve", "--writable", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--file", str(folder / "shared.db")],
        env={**os.environ, "DATASETTE_SECRET": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        page = process.stdout.readline().strip()
        assert page.startswith("http://127.0.0.1:"), process.communicate()
        yield page.removesuffix(PLACE)
    finally:
        process.send_signal(end)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said == f"taking tables into {folder / 'shared.db'}; Ctrl-C ends\n"


def token(**restrictions: Any) -> str:
    """As `datasette create-token` makes it."""
    from datasette.app import Datasette

    datasette = Datasette(memory=True, secret=SECRET)
    try:
        return str(asyncio.run(datasette.create_token("alice", **restrictions)))
    finally:
        datasette.close()
