"""Where a report goes: its files, and what the command answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

from ..errors import TunerError
from .compared import regrets
from .findings import Findings


def apart(*paths: Path | None) -> None:
    """See that no file takes the place of another. Raises TunerError."""
    for one, two in combinations((path for path in paths if path), 2):
        same = one.exists() and two.exists() and one.samefile(two)  # a link counts, too
        if same or one.resolve() == two.resolve():
            raise TunerError(f"{two} would replace {one}: name another file")


def write(path: Path, text: str) -> Path:
    """Write a file, and the folders above it. Raises TunerError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TunerError(f"cannot write {path}: {error.strerror}") from error
    return path


def answer(found: Findings, files: Iterable[Path]) -> dict[str, object]:
    """`mla-tune report`: of what, how much, and how good the stored plans are."""
    return {
        "device": found.device.key,
        "name": found.device.name,
        "source": found.source,
        **found.versions,
        "shapes": len(found.findings),
        "measurements": found.measurements,
        "left_out": found.left_out,
        "regret": [asdict(each) for each in regrets(found.findings)],
        "files": [str(path) for path in files],
    }
