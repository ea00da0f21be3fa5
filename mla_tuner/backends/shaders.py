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


def folder(kind: str) -> Path:
    """Where the files of a kind of device are: below `shaders/`."""
    return next((each for each in _FOLDERS if each.is_dir()), _FOLDERS[0]) / kind


def _read(name: str) -> str:
    return (folder(".") / name).read_text(encoding="utf-8")


_COMMENT_OR_LITERAL = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.DOTALL
)
_TOKEN = re.compile(
    r"""(?P<literal>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<word>\w+)
    |(?P<blank>\s+)
    |(?P<sign>.)""",
    re.VERBOSE,
)


def minified(source: str) -> str:
    """C++ without comments and needless blanks; a directive keeps a line of its own.

    Raises:
        ValueError: there is a raw string, which may hold anything.
    """
    if re.search(r'R"[^\s()\\]*\(', source):
        raise ValueError("[minified] expected no raw strings")
    spliced = source.replace("\\\n", "")
    plain = _COMMENT_OR_LITERAL.sub(lambda found: " " if found["comment"] else found[0], spliced)
    parts: list[str] = []  # runs of code, directives
    code: list[str] = []
    for line in plain.splitlines():
        if line.lstrip().startswith("#"):
            parts += [_tight("\n".join(code)), _tight(line, directive=True)]
            code = []
        else:
            code.append(line)
    return "\n".join(part for part in [*parts, _tight("\n".join(code))] if part)


def _tight(text: str, directive: bool = False) -> str:
    """Tokens with a blank between those that need one; in a directive, where there was any."""
    out: list[str] = []
    before, apart = "", False
    for token in _TOKEN.finditer(text.strip()):
        kind, word = str(token.lastgroup), token[0]
        if kind == "blank":
            apart = True
            continue
        if apart and (directive or _needs_blank(before, out[-1], kind, word)):
            out.append(" ")
        out.append(word)
        before, apart = kind, False
    return "".join(out)


def _needs_blank(before: str, last: str, kind: str, word: str) -> bool:
    """Whether two tokens would be others without a blank between them."""
    if before == "number" and last[-1] in "eEpP" and word in "+-":
        return True  # 0xe + 1 is no number
    if "sign" in (before, kind):
        return before == kind and not {last, word} & set("(){}[];,")
    return True  # words, numbers and literals
