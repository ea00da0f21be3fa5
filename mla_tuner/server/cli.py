"""`mla-tune share serve`, `pull` and `push`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..console import database, show
from ..errors import ShareError
from ..options import db_option, device_option, json_option, option, options
from ..parse import count, duration
from ..words import counted

_SECRET = "DATASETTE_SECRET"
_LEAST_SECRET = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_server = click.argument("server", metavar="URL")
_timeout = option("--timeout", duration, "TIME", "How long the server may take.", "30s")


@click.command()
@options(
    click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The shared file.  [default: shared.db beside the database]",
    ),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at."),
    option("--port", count(0, 65535), "N", "Port to listen at; 0: any that is free.", "8001"),
    click.option(
        "--writable",
        is_flag=True,
        help=f"Take tables from holders of tokens, signed with the secret in {_SECRET}.",
    ),
)
def serve(file: Path | None, host: str, port: int, writable: bool) -> None:
    """Show the tables of a team's machines in the browser, and give them to `pull`. Needs the
    `server` extra.

    Everybody who reaches the address can read. Evidence is only ever added.
    """
    file = file or database(None).with_name("shared.db")
    secret = _secret() if writable else None
    try:
        from .app import serve as listen
    except ModuleNotFoundError as error:
        raise ShareError(f"{error.name} is not here: pip install 'mla-tuner[server]'") from error

    def announce(url: str) -> None:
        click.echo(url)
        click.echo(f"{'taking tables into' if secret else 'reading'} {file}; Ctrl-C ends", err=True)
        if host not in _LOOPBACK:
            click.echo(f"everybody who reaches {host} can read", err=True)

    listen(file, host, port, secret, announce)


@click.command()
@options(_server, _timeout, device_option, db_option, json_option)
def pull(
    server: str, timeout: float, device: str | None, db: Path | None, as_json: bool | None
) -> None:
    """Take over what a team's server knows of this chip family and these kernels.

    All or nothing; own winners stay.
    """
    from .. import backends, share
    from .. import device as devices
    from ..store import Store
    from . import client

    here = devices.probe(device or "auto")
    text = client.fetch(server, here.family, backends.get(here.backend).digest(), timeout_s=timeout)
    name = f"{server.rstrip('/')}: {here.family}.json"
    table = share.load(text, name)
    if table.family != here.family:
        raise ShareError(f"{name}: family: it is of {table.family}, this device of {here.family}")
    with Store(database(db)) as store:
        added = share.into_store(table, store, name)
    answer = {"server": server, "family": table.family, **added}
    told = f"{counted(added['buckets'], 'bucket')} added, {added['known']} known already"
    show(answer, [f"{table.family}: {told}, in {database(db)}"], as_json)


@click.command()
@options(
    *(_server, _timeout),
    click.option("--token", metavar="T", help="A token of the server; other users see it in `ps`."),
    click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="A file with the token alone.",
    ),
    *(db_option, json_option),
)
def push(
    server: str,
    timeout: float,
    token: str | None,
    token_file: Path | None,
    db: Path | None,
    as_json: bool | None,
) -> None:
    """Give this database's results to a team's server, a table each chip family.

    Exit code 1 where a device can't be shared and was left out.
    """
    from .. import share
    from ..store import Store
    from . import client

    if (token is None) == (token_file is None):
        raise click.UsageError("give --token or --token-file")
    secret = token if token_file is None else _token(token_file)
    with Store(database(db), create=False) as store:
        tables, left_out = share.offers(store)
    texts = {table.family: share.sound(table) for table in tables}  # all, before one is sent
    sent = {
        family: client.send(server, text, secret or "", timeout_s=timeout)
        for family, text in texts.items()
    }
    lines = [
        f"{family}: {counted(n['new'], 'new result')}, {n['known']} known there"
        for family, n in sent.items()
    ]
    lines += [f"left out: {key}: {reason}" for key, reason in left_out.items()]
    show({"server": server, "families": sent, "left_out": left_out}, lines, as_json)
    if left_out:
        raise ShareError(f"{counted(len(left_out), 'device')} left out: see above")


def _secret() -> str:
    secret = os.environ.get(_SECRET, "")
    if len(secret) < _LEAST_SECRET:
        raise ShareError(
            f"{_SECRET} is {'too short' if secret else 'not set'}: put a random text there, "
            "for instance of `openssl rand -hex 32`, and give it to `datasette create-token`"
        )
    return secret


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ShareError(f"cannot read the token in {path}: {reason}") from error
