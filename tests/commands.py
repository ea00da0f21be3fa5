"""Runs `mla-tune` in this process, on the simulated device of the fixture `fake`."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from mla_tuner import cli

GRID = ["--contexts", "1k,4k", "--batches", "1", "--heads", "16"]
TUNE = ["--budget", "1h", *GRID]


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.main, args)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def answer(*args: str, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


def error(*args: str, code: int = 1) -> str:
    """The error line of a failing command; nothing is on stdout."""
    result = run(*args, code=code)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("Error: ")
    assert sum(line.startswith("Error: ") for line in lines) == 1
    return lines[-1].removeprefix("Error: ")


def lines(*args: str) -> list[str]:
    """What a command that may fail puts on stderr; never a traceback."""
    result = CliRunner().invoke(cli.main, args)
    assert result.exit_code in (0, 1)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stderr.splitlines()
