"""A stand-in for `mx.fast.metal_kernel` that runs the text on the CPU, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from .compiler import MODES
from .library import MAX_THREADS, Array, Counts, EmulationError, Triple, build
from .text import Argument, Kernel, Template

DRY = "dry"  # runs nothing: outputs are zeros, the texts are recorded


@dataclass(frozen=True)
class Launch:
    """One call of a kernel, done."""

    name: str  # as given to metal_kernel
    text: str  # what was compiled, edited if an edit was asked for
    template: tuple[tuple[str, object], ...]
    grid: Triple  # threads
    threadgroup: Triple
    arguments: dict[str, Array]  # inputs and outputs as the kernel saw them; bfloat16 as uint16
    counts: Counts | None  # of a checked launch


@dataclass(frozen=True)
class Options:
    mode: str
    shuffle: int | None
    edit: Callable[[str], str] | None
    thread_limit: int


@contextmanager
def emulated(
    mode: str = "fast",
    shuffle: int | None = None,
    edit: Callable[[str], str] | None = None,
    thread_limit: int = MAX_THREADS,
) -> Iterator[list[Launch]]:
    """Replaces `mx.fast.metal_kernel`, for as long as it lasts; gives the launches that were done.

    A kernel must be made inside: one that was made before is MLX's own. `mode`: "fast"; "check",
    which also counts; or "dry", which runs nothing. `shuffle` seeds another legal order of threads.
    `edit` changes the text before it is compiled. `thread_limit`: threads a threadgroup.
    """
    if mode not in (*MODES, DRY):
        raise ValueError(f"[msl] expected a mode of {(*MODES, DRY)}; got {mode!r}")
    launches: list[Launch] = []
    options = Options(mode, shuffle, edit, thread_limit)

    def metal_kernel(
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
    ) -> MetalKernel:
        if not output_names:
            raise ValueError("[metal_kernel] expected at least one output; got none")
        if atomic_outputs or compile_options:
            raise ValueError("[msl] atomic outputs and compile options are not emulated")
        kernel = Kernel(name, tuple(input_names), tuple(output_names), source, header)
        return MetalKernel(kernel, ensure_row_contiguous, options, launches)

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        yield launches


@dataclass(frozen=True)
class MetalKernel:
    """What `metal_kernel` returns: call it as MLX's, with keywords alone."""

    kernel: Kernel
    ensure_row_contiguous: bool
    options: Options
    launches: list[Launch]

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        """Runs the kernel. `grid` counts threads. Outputs start as NaN (all bits set)."""
        _check_lengths(self.kernel, inputs, output_shapes, output_dtypes)
        _check_stream(stream)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        given = tuple(template or ())
        made = self.kernel.text(arrays, output_dtypes, given)
        text = self.options.edit(made.text) if self.options.edit else made.text
        if verbose:
            print(f"Generated source code for `{self.kernel.name}`:\n```\n{text}\n```")
        if self.ensure_row_contiguous:
            arrays = [mx.contiguous(array) for array in arrays]
        outputs = [
            _output(shape, dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        memory = dict(zip(self.kernel.input_names, map(memory_of, arrays), strict=True))
        memory |= dict(zip(self.kernel.output_names, outputs, strict=True))
        if self.options.mode == DRY:
            counts = None
            for output in outputs:
                output[...] = 0
        else:
            buffers = [_content(argument, memory) for argument in made.arguments]
            starts = [_start(argument, memory) for argument in made.arguments]
            counts = self._run(text, buffers, starts, grid, threadgroup)
        self.launches.append(
            Launch(self.kernel.name, text, given, grid, threadgroup, memory, counts)
        )
        return [_as_mx(array, dtype) for array, dtype in zip(outputs, output_dtypes, strict=True)]

    def _run(
        self,
        text: str,
        buffers: list[Array],
        starts: list[int],
        grid: Triple,
        threadgroup: Triple,
    ) -> Counts | None:
        threads, limit = threadgroup[0] * threadgroup[1] * threadgroup[2], self.options.thread_limit
        if threads > limit:  # as asked for: MLX looks before it cuts the threadgroup to the grid
            raise ValueError(
                f"[metal_kernel] expected at most {limit} threads a threadgroup; got {threads}"
            )
        size = (
            min(threadgroup[0], grid[0]),
            min(threadgroup[1], grid[1]),
            min(threadgroup[2], grid[2]),
        )
        try:
            kernel = build(text, self.options.mode)
            return kernel.run(buffers, grid, size, self.options.shuffle, starts)
        except EmulationError as error:
            raise EmulationError(f"{self.kernel.name}: {error}") from None


def _check_lengths(
    kernel: Kernel, inputs: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]
) -> None:
    for what, given, names in (
        ("inputs", inputs, kernel.input_names),
        ("output_shapes", shapes, kernel.output_names),
        ("output_dtypes", dtypes, kernel.output_names),
    ):
        if len(given) != len(names):
            raise ValueError(
                f"[metal_kernel] expected `{what}` to have {len(names)} members; got {len(given)}"
            )


def _check_stream(stream: object) -> None:
    device = getattr(stream, "device", stream)
    if device is not None and device != mx.gpu:
        raise ValueError(f"[metal_kernel] expected a stream of the GPU; got {stream}")


def memory_of(array: mx.array) -> Array:
    """The memory of an evaluated array, with its strides: a view, not a copy."""
    if array.dtype == mx.bfloat16:  # numpy has none
        array = array.view(mx.uint16)
    mx.eval(array)
    return np.asarray(array)


def _as_mx(array: Array, dtype: mx.Dtype) -> mx.array:
    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _output(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Array:
    if init_value is not None:
        return np.array(memory_of(mx.full(shape, init_value, dtype)))
    out: Array = np.empty(shape, memory_of(mx.zeros((), dtype)).dtype)
    out.reshape(-1).view(np.uint8)[:] = 0xFF
    return out


def _content(argument: Argument, memory: dict[str, Array]) -> Array:
    array = memory[argument.name]
    if argument.role == "shape":
        return np.array(array.shape, np.int32)
    if argument.role == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    if argument.role == "ndim":
        return np.array(array.ndim, np.int32)
    return array


def _start(argument: Argument, memory: dict[str, Array]) -> int:
    """Bytes by which an input would start behind a multiple of 16 if Metal held its buffer.

    A slice of an array starts within a buffer, and Metal's own begin at such a multiple.
    """
    array = memory[argument.name]
    if argument.role != "input" or not array.size:
        return 0
    return (array.ctypes.data - _buffer_start()) % 16


@cache
def _buffer_start() -> int:
    """Address modulo 16 of what MLX allocates on a CPU: one number, a header stands in front."""
    return memory_of(mx.zeros(64)).ctypes.data % 16
