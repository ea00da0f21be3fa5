"""A PostgreSQL server of the tests' own: on loopback, with a password, in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PASSWORD = "p@ss/w{o}rd:%"  # all that a URL may trip over
QUOTED = "p%40ss%2Fw%7Bo%7Drd%3A%25"
CONFIG = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
fsync = off
max_connections = 60
"""


def programs() -> Path | None:
    """Folder of PostgreSQL's programs; None where it is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class Server:
    """One server; `url` is that of its database `postgres`."""

    def __init__(self, folder: Path, port: int, user: str | None) -> None:
        self.folder, self.port, self.user = folder, port, user
        self.url = f"postgresql://tuner:{QUOTED}@127.0.0.1:{port}/postgres"

    def run(self, program: str, *args: str) -> None:
        """Run a program of PostgreSQL; root may not, so that user does."""
        found = programs()
        assert found
        done = subprocess.run(
            [found / program, "-D", self.folder / "data", *args],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            user=self.user,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        self.run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"))

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-w", "-m", "fast")


@contextmanager
def server() -> Iterator[Server]:
    """A new server, which is stopped and removed in the end."""
    user = None if os.geteuid() else unprivileged()
    with tempfile.TemporaryDirectory(prefix="mla-tuner-pg-") as name:
        folder = Path(name)
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Server(folder, port, user)
        secret = f"--pwfile={folder / 'password'}"
        made.run("initdb", "-U", "tuner", "-A", "scram-sha-256", secret, "--no-sync", "-E", "UTF8")
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.write(CONFIG.format(port=port))
        made.start()
        try:
            yield made
        finally:
            with suppress(AssertionError):  # a test may have stopped it
                made.run("pg_ctl", "stop", "-m", "immediate")


def unprivileged() -> str:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise AssertionError("PostgreSQL refuses to run as root, and there is no other user")
