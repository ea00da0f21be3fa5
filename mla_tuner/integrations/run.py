"""A command of mlx-lm with its decode routed: `python -m mla_tuner.integrations.run mlx_lm.server`.

What follows the module's name are its own options. With MLA_TUNER=log the counts are printed on
stderr when it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import TunerError
from . import mlx_lm

USAGE = "usage: python -m mla_tuner.integrations.run mlx_lm.server|mlx_lm.generate|... [OPTIONS]"


def run(arguments: Sequence[str]) -> None:
    """Install, then run the module's `main` with these arguments as the command line.

    Raises:
        TunerError: there is no such module, or it is no command. What the command itself raises,
            SystemExit included, goes through.
    """
    if not arguments or not arguments[0].startswith("mlx_lm"):
        raise TunerError(USAGE)
    name = arguments[0]
    try:
        command = import_module(name).main
    except (ImportError, AttributeError) as error:
        raise TunerError(f"{name} is no command that can run here: {error}") from error
    mlx_lm.install()
    before, sys.argv = sys.argv, list(arguments)
    try:
        command()
    finally:
        sys.argv = before
        if os.environ.get("MLA_TUNER", "").lower() == "log":
            print(mlx_lm.stats(), file=sys.stderr)


def main() -> None:
    """`run` the command line; a known failure is one line."""
    try:
        run(sys.argv[1:])
    except TunerError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
