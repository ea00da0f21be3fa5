"""Launches built kernels on numpy arrays."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .compiler import MODES, cores, shared_library
from .translate import CPP, FILE, MAX_BUFFERS, Translation, for_emulator

Array = NDArray[Any]
Triple = tuple[int, int, int]

MAX_THREADS = 1024  # of a threadgroup, on any Apple GPU

COUNTED = (  # as in runtime.h
    "matrix_ops",
    "simd_ops",
    "barriers",
    "simd_barriers",
    "fmas",
    "exp2s",
    "threadgroup_read",
    "threadgroup_written",
    "threadgroup_bytes",
)


class EmulationError(Exception):
    """What went wrong while a kernel ran; one line a fault."""


@dataclass(frozen=True)
class Counts:
    """What one checked launch did.

    Bytes read and written are summed over lanes: one value that 32 lanes read counts 32 times.
    """

    read: dict[str, int]  # bytes of device memory by buffer name, `x_shape` and the like included
    written: dict[str, int]
    matrix_ops: int  # products of 8x8 matrices: 512 multiply-adds each
    simd_ops: int  # sums, maxima, shuffles, votes; one for a simdgroup
    barriers: int  # one for a threadgroup
    simd_barriers: int  # one for a simdgroup
    fmas: int  # multiply-adds outside matrix_ops that are written as fma(); one for a lane
    exp2s: int  # one for a lane
    threadgroup_read: int  # bytes
    threadgroup_written: int  # bytes
    threadgroup_bytes: int  # the memory of the threadgroup that took most


class _Buffer(ctypes.Structure):  # msl::Buffer
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint64),
        ("past", ctypes.c_uint64),
    ]


class _Launch(ctypes.Structure):  # msl::Launch
    _fields_ = [
        ("buffers", _Buffer * MAX_BUFFERS),
        ("threads", ctypes.c_uint32 * 3),
        ("group_size", ctypes.c_uint32 * 3),
    ]


class Library:
    """One kernel, ready to run. Not for several threads at once."""

    def __init__(self, path: Path, translation: Translation, mode: str) -> None:
        self.path, self.mode = path, mode
        self.name, self.buffers = translation.name, translation.buffers
        self.text = translation.text
        self._library = ctypes.CDLL(str(path))
        self._library.msl_reports.restype = ctypes.c_char_p
        self._library.msl_counts.restype = ctypes.POINTER(ctypes.c_uint64)

    def run(
        self,
        buffers: Sequence[Array],
        threads: Triple,
        group_size: Triple,
        shuffle: int | None = None,
        starts: Sequence[int] = (),
    ) -> Counts | None:
        """Runs a grid of `threads`; returns what a checked build counts.

        `buffers`: one array a buffer index. What the kernel may write is written in place, and must
        be contiguous; other arrays are passed as they lie in memory, first element to last.
        `shuffle` seeds another legal order of the threads. `starts`: bytes by which each buffer
        starts behind a multiple of 16; none does by default, as with buffers that Metal allocates.
        Raises EmulationError for what the kernel does wrong, ValueError for a launch that Metal
        would refuse.
        """
        self._check(buffers, threads, group_size)
        launch = _Launch(threads=threads, group_size=group_size)
        pasts = starts or [0] * len(buffers)
        for index, (array, past) in enumerate(zip(buffers, pasts, strict=True)):
            # numpy's address of an empty array may be anything: no byte of it is read.
            launch.buffers[index] = _Buffer(
                array.ctypes.data, span_bytes(array), not self.buffers[index].read_only, past
            )
        seed = ctypes.c_uint64(0 if shuffle is None else shuffle + 1)
        if self._library.msl_launch(ctypes.byref(launch), cores(), seed):
            raise EmulationError(self._with_lines(self._library.msl_reports().decode()))
        return self._counts() if self.mode == "check" else None

    def _check(self, buffers: Sequence[Array], threads: Triple, group_size: Triple) -> None:
        if len(buffers) != len(self.buffers):
            raise ValueError(f"[msl] expected {len(self.buffers)} buffers; got {len(buffers)}")
        if min(*threads, *group_size) < 1:
            raise ValueError(
                f"[msl] expected a grid that is not empty; got {threads} by {group_size}"
            )
        in_group = group_size[0] * group_size[1] * group_size[2]
        if in_group > MAX_THREADS:
            raise ValueError(
                f"[msl] expected at most {MAX_THREADS} threads a threadgroup; got {in_group}"
            )
        for index, array in enumerate(buffers):
            writable = array.flags.writeable and array.flags.c_contiguous
            if not self.buffers[index].read_only and not writable:
                raise ValueError(f"[msl] buffer {index} is written: it must be contiguous")

    def _counts(self) -> Counts:
        values = self._library.msl_counts()
        numbers = {name: values[i] for i, name in enumerate(COUNTED)}
        first = len(COUNTED)
        read = {p.name: values[first + i] for i, p in self.buffers.items()}
        first += MAX_BUFFERS
        outputs = {i: p.name for i, p in self.buffers.items() if not p.read_only}
        written = {name: values[first + i] for i, name in outputs.items()}
        return Counts(read, written, **numbers)

    def _with_lines(self, reports: str) -> str:
        """Puts line and statement for each ` @0x...`, a place in the library, and ` site 123`."""

        def place(match: re.Match[str]) -> str:
            command = ["addr2line", "-i", "-e", str(self.path), hex(int(match[1], 16) - 1)]
            frames = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
            own = [frame for frame in frames if str(CPP) not in frame and "?" not in frame]
            where = Path(own[0].split(" (")[0]).name if own else ""
            return f" at {where}{self._quoted(where)}" if where else ""

        def site(match: re.Match[str]) -> str:
            line, column = divmod(int(match[1]), 1024)
            return f" line {line}:{column}{self._quoted(f'{FILE}:{line}')}"

        reports = re.sub(r" @(0x[0-9a-f]+)", place, reports)
        return re.sub(r" site (\d+)", site, reports).strip()

    def _quoted(self, where: str) -> str:
        """The statement there, unless the text gives its lines other names."""
        file, _, line = where.partition(":")
        known = file == FILE and "#line" not in self.text
        return f" `{self.text.splitlines()[int(line) - 1].strip()}`" if known else ""


def span_bytes(array: Array) -> int:
    """From the first element of a strided array to behind the last; a view may skip parts of it."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if min(steps, default=0) < 0 < array.size:
        raise ValueError(
            "[msl] expected a buffer to start at its first element; got a reversed one"
        )
    return sum(steps) + array.itemsize if array.size else 0


@cache
def build(text: str, mode: str = "fast") -> Library:
    """The kernel in `text`, which stands behind MLX's utilities. Modes: fast, check.

    Raises SourceError for a text that the translator or g++ does not take.
    """
    if mode not in MODES:
        raise ValueError(f"[msl] expected a mode of {MODES}; got {mode!r}")
    translation = for_emulator(text)
    return Library(shared_library(translation.code, mode), translation, mode)
