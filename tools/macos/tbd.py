"""Writes .tbd files (text in a dylib's stead) for the two Apple libraries zig does not ship.

A .tbd that lists too much would let a missing symbol pass. So libc++ lists exactly what the real
libmlx.dylib imports from it, plus old exports that nanobind and plain C++ need.
"""

from __future__ import annotations

from pathlib import Path

from .macho import imports

LIBOBJC = {"_objc_getProtocol", "_objc_lookUpClass", "_objc_msgSend", "_sel_registerName"}

# In Apple's libc++ since long before macOS 14. Extend it only with symbols you have checked.
_STRING = "__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE"
LIBCXX_EXTRA = {
    _STRING + "21__grow_by_and_replaceEmmmmmmPKc",
    *("__ZNSt8bad_castC1Ev", "__ZNSt8bad_castD1Ev", "__ZNSt8bad_castD2Ev", "__ZTISt8bad_cast"),
    *("__ZTISt11range_error", "__ZTISt12domain_error", "__ZTVN10__cxxabiv116__enum_type_infoE"),
    *("__ZdlPvSt11align_val_t", "__ZdlPvm", "__ZdlPvmSt11align_val_t", "__ZnwmSt11align_val_t"),
    *("__ZnamRKSt9nothrow_t", "___cxa_demangle", "__ZTINSt3__112system_errorE"),
}


def write_tbds(libmlx: Path, folder: Path) -> list[Path]:
    libcxx = {i.symbol for i in imports(libmlx) if i.library == "/usr/lib/libc++.1.dylib"}
    if not libcxx:
        raise ValueError(f"{libmlx} imports nothing from libc++: the wheel has changed")
    return [
        _write(folder / "libc++.1.tbd", "/usr/lib/libc++.1.dylib", libcxx | LIBCXX_EXTRA),
        _write(folder / "libobjc.A.tbd", "/usr/lib/libobjc.A.dylib", LIBOBJC),
    ]


def _write(path: Path, install_name: str, symbols: set[str]) -> Path:
    listed = ",\n      ".join(f"'{symbol}'" for symbol in sorted(symbols))
    path.write_text(
        f"""--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '{install_name}'
current-version: 1
exports:
  - targets: [ arm64-macos ]
    symbols: [
      {listed} ]
...
"""
    )
    return path
