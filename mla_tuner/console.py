"""What every command does with its database and its answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from .errors import StoreError


def database(path: Path | None) -> Path:
    """The database that --db named, else the user's.

    Raises:
        StoreError: its name begins with the home folder of a user who does not exist.
    """
    from .table import default_path

    try:
        return path.expanduser() if path else default_path()
    except RuntimeError as error:
        raise StoreError(f"cannot use the database {path}: {error}") from error


def show(answer: object, text: Iterable[Any], as_json: bool | None) -> None:
    """The result on stdout, as JSON or as what `report` can show."""
    if as_json:
        from .answers import finite

        click.echo(json.dumps(finite(answer), indent=2, allow_nan=False))
    else:
        from . import report

        report.show(text)
