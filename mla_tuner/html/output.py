"""Where a report goes: its files, and what the command answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ..errors import TunerError
from .compared import regrets
from .findings import Findings


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
