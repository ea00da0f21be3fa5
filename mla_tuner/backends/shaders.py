"""Kernel source texts: read from the package, joined, and made short.

MLX hashes a kernel's whole text at every evaluation, so comments and needless blanks go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "shaders", _PACKAGE.parent / "shaders")  # installed; in the source tree


class Text(NamedTuple):
    """What `mx.fast.metal_kernel` and `cuda_kernel` take: functions, and the kernel's body."""

    header: str
    body: str


@cache
def text(header: tuple[str, ...], body: str) -> Text:
    """Shortened texts of files below `shaders/`, the header's joined.

    Raises:
        OSError: one of them is not there.
    """
    return Text(minified("\n".join(map(_read, header))) + "\n", minified(_read(body)))


def digest(texts: Iterable[Text]) -> str:
    """16 hex digits that change with any of the texts."""
    return sha256("\0".join(part for text in texts for part in text).encode()).hexdigest()[:16]


def _read(name: str) -> str:
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])
    return (folder / name).read_text(encoding="utf-8")


_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING = re.compile(r'("(?:[^"\\\n]|\\.)*")')
# A blank stays between two words, and between two signs that together would be another one.
_NEEDLESS = re.compile(
    r"(?<=[\w\"]) (?=[^\w\s\"])|(?<=[^\w\s\"]) (?=[\w\"])|(?<=[(){}\[\];,]) | (?=[(){}\[\];,])"
)


def minified(source: str) -> str:
    """C++ without comments and needless blanks; a directive keeps a line of its own."""
    source = _COMMENT.sub(lambda found: found[1] or " ", source)
    lines: list[str] = []
    for line in re.sub(r"\\\n", " ", source).splitlines():
        if line.lstrip().startswith("#"):
            # The blank between a macro's name and what it stands for means something.
            lines += ["\n", " ".join(line.split()), "\n"]
        else:
            lines += [line, " "]
    joined = re.sub(r" *\n+ *", "\n", "".join(lines))
    return "\n".join(map(_tight, joined.strip().splitlines()))


def _tight(line: str) -> str:
    if line.startswith("#"):
        return line
    parts = _STRING.split(line)  # text, string, text, ...
    parts[::2] = [_NEEDLESS.sub("", " ".join(f"|{part}|".split()))[1:-1] for part in parts[::2]]
    return "".join(parts)
