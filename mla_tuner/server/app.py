"""Datasette around the shared file: what may be read, who may add, how it is started.

With `pages` the only importer of datasette. All is Datasette's own: its tables and their JSON, its
canned queries, its signed tokens; `pages` adds what it can't know.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import uvicorn
from datasette import handle_exception
from datasette.app import Datasette
from datasette.database import Database
from datasette.plugins import pm

from ..errors import ShareError
from . import archive, pages
from .client import PLACE
from .config import METADATA, NAME, QUERIES

MAX_PUSH_BYTES = 32 << 20
_GRACE_S = 5  # for answers under way when the server is stopped


def application(path: Path, secret: str | None) -> Any:
    """The server of the file at `path`, made if need be; without a secret it only reads.

    secret: what tokens are signed with, as `datasette create-token --secret` was given it.

    Raises:
        ShareError: the file is another program's, newer, or can't be used.
    """
    archive.prepare(path, create=secret is not None)
    if not pm.is_registered(pages):
        pm.register(pages, name="mla_tuner")
    # It would print every value around an exception, also of a page not found: tokens among them.
    handle_exception.rich = None
    datasette = Datasette(
        memory=True,  # else it wants a file here, and would name the database after it
        config={
            # Every token that is signed with the secret, unless its own restrictions say otherwise.
            "permissions": {pages.PUSH: {"id": "*"} if secret else False},
            "databases": {NAME: {"queries": QUERIES}},
        },
        metadata=METADATA,
        template_dir=str(Path(__file__).parent / "templates"),
        secret=secret,
        settings={
            "default_allow_sql": False,  # the canned queries are there for everybody
            "allow_signed_tokens": secret is not None,
            "max_post_body_bytes": MAX_PUSH_BYTES,
        },
    )
    datasette.remove_database("_memory")
    datasette.add_database(Database(datasette, path=str(path)), name=NAME)
    return datasette


def serve(
    path: Path, host: str, port: int, secret: str | None, announce: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM; `announce` gets the address where connections are taken.

    port 0: any that is free.

    Raises:
        ShareError: as `application`, or the address is taken or not this machine's.
    """
    # uvicorn raises a signal again when it is done: as this, what is open gets closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(application(path, secret)) as datasette, closing(_listen(host, port)) as listener:
        name = f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{listener.getsockname()[1]}{PLACE}")
        config = uvicorn.Config(
            *(datasette.app(), host, port),
            log_level="warning",  # no line a request: addresses of readers are nobody's business
            lifespan="on",
            timeout_graceful_shutdown=_GRACE_S,
        )
        with suppress(KeyboardInterrupt):
            asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ShareError(f"cannot listen on {host} port {port}: {reason}") from error
