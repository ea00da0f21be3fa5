"""A command of mlx-lm with its decode routed: the body of `mla-tune run`."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from ..errors import TunerError
from ..modes import mode
from . import mlx_lm


def run(arguments: Sequence[str], *, absorb: bool = False, write_misses: bool = False) -> None:
    """Install, then run the module's `main` with these arguments as the command line.

    absorb: as `mlx_lm.install` takes it. write_misses: when the command has ended, in whatever way
    Python is told of; stderr names the file.

    Raises:
        TunerError: there is no such module, or it is no command, or MLA_TUNER is none of its
            values. What the command itself raises, SystemExit included, goes through; an OSError
            as its traceback and exit code 1, Ctrl-C as the exit code of a shell.
    """
    name = arguments[0]
    if name.split(".")[0] != "mlx_lm":
        raise TunerError(f"{name} is no command of mlx-lm: mlx_lm.server, mlx_lm.generate, ..")
    mode()  # refused here, where somebody reads it
    try:
        command = import_module(name).main
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mlx_lm":
            raise TunerError("mlx-lm is not here: pip install 'mla-tuner[mlx-lm]'") from error
        raise TunerError(f"{name} is no command that can run here: {error}") from error
    mlx_lm.install(absorb=absorb)
    before, sys.argv = sys.argv, list(arguments)
    try:
        command()
    except OSError:  # a port in use, say, which `mla-tune` would take for output that can't leave
        traceback.print_exc()
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        sys.argv = before
        if write_misses:
            _write_misses()


def _write_misses() -> None:
    stats = mlx_lm.stats()
    file = stats.write_misses() if stats.misses else "none"
    if file:  # else a log line has said why not
        print(f"misses: {file}", file=sys.stderr)
