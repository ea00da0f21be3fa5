"""Where `mla-tune` starts: what fails before and after the command is one line, too."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def main() -> None:
    """Run the command. Ctrl-C while modules load, or output that nobody takes: exit code 1."""
    try:
        from .cli import main as command

        command(prog_name="mla-tune")
    except KeyboardInterrupt:
        sys.exit("Error: interrupted")
    except OSError as error:
        if error.filename is not None:  # of a file, not of the output
            raise
        with suppress(OSError):
            print(f"Error: cannot write the output: {error.strerror}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            _give_up(stream)
        sys.exit(1)


def _give_up(stream: TextIO) -> None:
    """Where a stream is stuck, let it lead nowhere: Python would try again at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
