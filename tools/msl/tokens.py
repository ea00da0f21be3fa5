"""C++ tokens: enough to edit preprocessed Metal source piece by piece."""

from __future__ import annotations

import re
from typing import NamedTuple

TOKEN = re.compile(
    r"""
    (?P<directive> ^[ \t]*\#[^\n]* )
  | (?P<space>     [ \t\r\f\v]+ | \n )
  | (?P<string>    "(?:\\.|[^"\\\n])*" )
  | (?P<character> '(?:\\.|[^'\\\n])*' )
  | (?P<name>      [A-Za-z_]\w* )
  | (?P<number>    \.?\d(?:[eEpP][+-]|[\w.])* )
  | (?P<mark>      :: | -> | . )
    """,
    re.VERBOSE | re.MULTILINE,
)
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


class Token(NamedTuple):
    kind: str
    text: str


class SourceError(ValueError):
    """Metal source that the translator (it never guesses) or a compiler does not take."""


class Tokens:
    """The tokens of a source; `code` are those that are neither space nor preprocessor lines.

    Positions count code tokens. Edits replace or blank tokens; line breaks always stay, so that
    line numbers stay true.
    """

    def __init__(self, source: str) -> None:
        self._all = [Token(str(m.lastgroup), m.group()) for m in TOKEN.finditer(source)]
        self._at = [i for i, t in enumerate(self._all) if t.kind not in ("space", "directive")]
        self.code = [self._all[i] for i in self._at]
        self._new = [token.text for token in self._all]

    def text(self, position: int) -> str:
        return self.code[position].text if 0 <= position < len(self.code) else ""

    def is_name(self, position: int) -> bool:
        return 0 <= position < len(self.code) and self.code[position].kind == "name"

    def match(self, position: int) -> int:
        """The position of the bracket that closes the one at `position`."""
        opening = self.text(position)
        closing, depth = CLOSING[opening], 0
        for at in range(position, len(self.code)):
            text = self.text(at)
            depth += (text == opening) - (text == closing)
            if depth == 0:
                return at
            if opening == "<" and text in (";", "{"):
                break
        raise SourceError(f"`{opening}` is never closed: {self.around(position)}")

    def split(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges between commas in [start, end), commas inside brackets aside."""
        ranges, depth, first = [], 0, start
        for at in range(start, end):
            text = self.text(at)
            depth += (text in "([{<") - (text in ")]}>")
            if text == "," and depth == 0:
                ranges.append((first, at))
                first = at + 1
        return [*ranges, (first, end)] if first < end else ranges

    def source(self, start: int, end: int) -> str:
        """The original text of [start, end), on one line."""
        if start >= end:
            return ""
        pieces = self._all[self._at[start] : self._at[end - 1] + 1]
        return " ".join("".join(t.text for t in pieces if t.kind != "directive").split())

    def around(self, position: int) -> str:
        """The text near `position`, for messages."""
        return self.source(max(0, position - 12), min(len(self.code), position + 12))

    def replace(self, start: int, end: int, text: str) -> None:
        """Puts `text` in place of [start, end); the line breaks in it stay, behind `text`."""
        first, last = self._at[start], self._at[end - 1] + 1
        for at in range(first, last):
            if self._all[at].kind != "directive":
                self._new[at] = "\n" if self._all[at].text == "\n" else ""
        self._new[first] = text

    def blank(self, start: int, end: int) -> None:
        self.replace(start, end, "")

    def edited(self) -> str:
        return "".join(self._new)
