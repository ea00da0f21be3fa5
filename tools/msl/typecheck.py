"""The type check: Metal source against declarations with real address spaces, by clang.

g++ runs the kernels without address spaces, so it takes what Metal refuses: a pointer without its
space, a threadgroup pointer in a device variable, a double. clang knows them. It comes inside zig,
from PyPI, the same that tools/macos uses.
"""

from __future__ import annotations

import importlib.util
import subprocess
from functools import cache
from pathlib import Path

from .translate import CPP, for_type_check

FLAGS = [
    *("-x", "c++", "-std=c++17", "-fsyntax-only", "-ffreestanding", "-nostdinc"),
    *("-target", "x86_64-unknown-linux", "-ferror-limit=20", "-Wno-unknown-attributes"),
    *("-Wno-ignored-attributes", "-Wno-duplicate-decl-specifier", "-Wno-unknown-pragmas"),
]


@cache
def clang() -> tuple[str, ...]:
    """The command; FileNotFoundError where the package is not installed."""
    found = importlib.util.find_spec("ziglang")
    if not found or not found.origin:
        raise FileNotFoundError("[msl] the type check needs clang: pip install ziglang")
    return (str(Path(found.origin).parent / "zig"), "clang")


def type_check(text: str) -> str:
    """The errors in `text` as clang words them; "" if there are none."""
    command = [*clang(), *FLAGS, "-I", str(CPP), "-"]
    done = subprocess.run(command, input=for_type_check(text), capture_output=True, text=True)
    return done.stderr if done.returncode else ""
