"""Kernel texts with short names.

MLX rebuilds a kernel's text at every call and hashes it at every evaluation: 0.25 us a KB and
launch, on one H200's host (MLX 0.32.4, 2026-11-29). Short names take 5 KB off the two launches of a
call, 1.3 us of some 35, and small calls are bound by the host. A compiler doesn't mind them, and
the files keep the long ones. What could go wrong is a text that doesn't compile: the tests compile
every one, and a kernel that fails on a device is refused there. Macros keep their names, for they
hold in what follows, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set
from itertools import product
from string import ascii_lowercase, digits

from .shaders import Text

_STRING = re.compile(r'("(?:[^"\\\n]|\\.)*")')
_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")
_MACRO = re.compile(r"#define (\w+)")
# What C++ and CUDA name. A word that is missing here makes a text that doesn't compile.
_KEPT = frozenset(
    _WORD.findall("""
    asm bool char const constexpr continue define else endif extern false float for if ifdef int
    long namespace pragma return short static_assert struct template true typedef unroll unsigned
    void volatile while
    float2 float4 uint2 uint4 make_float2 make_float4 make_uint2 make_uint4 x y z w
    blockIdx gridDim threadIdx exp2f fmaf fmaxf log2f max min mla
    """)
)


def shorter(text: Text, names: Set[str]) -> Text:
    """The same text with short names for all that it declares.

    `names`, and words that end in `_shape` or `_strides`, belong to MLX and the back end.
    """
    words = Counter(word for part in text for word in _words(part))
    kept = names | _KEPT | set(_MACRO.findall(text.header))
    own = [word for word, _ in words.most_common() if not (word in kept or _foreign(word))]
    new = dict(zip(own, (name for name in _short() if name not in words), strict=False))

    def renamed(part: str) -> str:
        pieces = _STRING.split(part)  # text, string, text, ...
        pieces[::2] = [
            _WORD.sub(lambda found: new.get(found[0], found[0]), piece) for piece in pieces[::2]
        ]
        return "".join(pieces)

    return Text(renamed(text.header), renamed(text.body))


def _words(part: str) -> Iterator[str]:
    for piece in _STRING.split(part)[::2]:
        yield from _WORD.findall(piece)


def _foreign(word: str) -> bool:
    return len(word) == 1 or word.startswith("__") or word.endswith(("_strides", "_shape"))


def _short() -> Iterator[str]:
    yield from ascii_lowercase
    yield from map("".join, product("abcdefghiklmnopqrstuvwxz", digits))  # not j0: C has it
