"""Reads what a Mach-O file imports (thin, 64-bit, little-endian: what an arm64 dylib is)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC_64 = 0xFEEDFACF
CPU_ARM64 = 0x0100000C
LC_SYMTAB = 0x2
# LOAD_DYLIB, LAZY_LOAD, LOAD_WEAK, REEXPORT, LOAD_UPWARD: each takes the next ordinal.
LC_DYLIBS = {0xC, 0x20, 0x80000018, 0x8000001F, 0x80000023}
N_STAB, N_TYPE, N_EXT = 0xE0, 0x0E, 0x01
NO_LIBRARY = {0x00, 0xFE, 0xFF}  # itself, looked up at run time, the main executable


@dataclass(frozen=True)
class Import:
    symbol: str
    library: str  # install name; "" when the linker found none that has it


def imports(path: Path) -> list[Import]:
    """Every symbol the thin arm64 Mach-O file takes from elsewhere.

    Raises ValueError for any other kind of file.
    """
    data = path.read_bytes()
    magic, cpu, _, _, command_count = struct.unpack_from("<5I", data)
    if magic != MAGIC_64 or cpu != CPU_ARM64:
        raise ValueError(f"{path} is not a thin arm64 Mach-O file")
    libraries, symtab, at = [""], (0, 0, 0, 0), 32
    for _ in range(command_count):
        command, size = struct.unpack_from("<2I", data, at)
        if command in LC_DYLIBS:
            name = at + struct.unpack_from("<I", data, at + 8)[0]
            libraries.append(_string(data, name))
        elif command == LC_SYMTAB:
            symtab = struct.unpack_from("<4I", data, at + 8)
        at += size
    symbols_at, count, strings_at, _ = symtab
    found: list[Import] = []
    for i in range(count):
        name, kind, _, description, _ = struct.unpack_from("<IBBHQ", data, symbols_at + 16 * i)
        undefined = not kind & N_STAB and kind & N_EXT and not kind & N_TYPE
        if undefined:
            ordinal = description >> 8
            library = "" if ordinal in NO_LIBRARY else libraries[ordinal]
            found.append(Import(_string(data, strings_at + name), library))
    return found


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
