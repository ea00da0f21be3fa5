"""Multiply-add peak and read bandwidth of this machine, quick enough for benchmark rounds.

    python -m tools.peaks.peaks [--threads 1,2]

The small C++ library is built on first use with the system compiler ($CXX, c++, g++ or
clang++), into build/peaks.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("peaks.cpp")
BUILD = Path(__file__).resolve().parents[2] / "build" / "peaks"
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-Wall", "-fPIC", "-shared", "-pthread"]


def isas() -> list[str]:
    """Instruction sets that run here, best first: of "avx512", "avx2", "neon", "generic"."""
    names: list[str] = []
    while name := _library().peaks_isa(len(names)):
        names.append(name.decode())
    return names


def fma_gflops(threads: int = 1, isa: str = "", ms: float = 5.0) -> float:
    """fp32 multiply-add GFLOP/s (two operations each) of `threads` threads, over about `ms`.

    `isa` "" is the best one. Raises ValueError for an instruction set that does not run here.
    """
    return _known(_library().peaks_fma(isa.encode(), threads, ms), isa)


class Reader:
    """A buffer of `bytes_`, read again and again: streaming bandwidth at that size."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_
        self._buffer = _library().peaks_buffer(bytes_)
        if not self._buffer:
            raise MemoryError(f"[Reader] expected room for {bytes_} bytes; got none")

    def gb_per_s(self, threads: int = 1, isa: str = "", passes: int = 2) -> float:
        """GB/s (1e9 bytes) of one pass shared by `threads` threads; the best of `passes`."""
        return _known(
            _library().peaks_read(isa.encode(), self._buffer, self.bytes, threads, passes), isa
        )

    def close(self) -> None:
        if self._buffer:
            _library().peaks_free(self._buffer)
            self._buffer = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _known(value: float, isa: str) -> float:
    if value < 0:
        raise ValueError(f"[peaks] expected isa in {isas()}; got {isa!r}")
    return value


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_build()))
    library.peaks_isa.restype = ctypes.c_char_p
    library.peaks_isa.argtypes = [ctypes.c_int]
    library.peaks_fma.restype = ctypes.c_double
    library.peaks_fma.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
    library.peaks_buffer.restype = ctypes.c_void_p
    library.peaks_buffer.argtypes = [ctypes.c_size_t]
    library.peaks_free.restype = None
    library.peaks_free.argtypes = [ctypes.c_void_p]
    library.peaks_read.restype = ctypes.c_double
    library.peaks_read.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return library


def _build() -> Path:
    """The library built from today's source; another source or other flags get another name."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    target = BUILD / f"libpeaks-{platform.machine()}-{digest}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run([_compiler(), *FLAGS, str(SOURCE), "-o", str(partial)], check=True)
        partial.replace(target)  # two processes may build at once
    return target


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("[peaks] expected a C++ compiler ($CXX, c++, g++ or clang++); got none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    threads = [int(n) for n in parser.parse_args().threads.split(",")]
    print("| what | " + " | ".join(f"{n} thread{'s' * (n > 1)}" for n in threads) + " |")
    print("|---|" + "---|" * len(threads))
    for isa in isas():
        best = [max(fma_gflops(n, isa) for _ in range(15)) for n in threads]
        print(f"| fp32 FMA {isa}, GFLOP/s | " + " | ".join(f"{v:.0f}" for v in best) + " |")
    for kb in (1024, 38_000, 151_000, 1_200_000):
        with Reader(kb * 1024) as reader:
            passes = max(3, 400_000 // kb)
            best = [reader.gb_per_s(n, passes=passes) for n in threads]
        print(f"| read {kb} KB, GB/s | " + " | ".join(f"{v:.1f}" for v in best) + " |")


if __name__ == "__main__":
    main()
