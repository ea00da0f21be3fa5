"""What MLX would launch for a plan, kept instead of launched; no GPU is needed.

The texts and launches are the back end's own. Only three things are told apart in what it passes:
the call's own arrays (by identity, also behind `mx.as_strided`), results of the launch before, and
small arrays of numbers, whose contents are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mla_tuner import backends
from mla_tuner.backends import Call, shaders
from mla_tuner.backends import cuda as cuda_backend
from mla_tuner.caches import PagedCache
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools.nvrtc import Kernel, recorded

from .choices import BLOCK_SIZE, blocks_of

MOST_NUMBERS = 1 << 16  # of an array whose contents are kept


class Array(NamedTuple):
    """What a kernel gets for one name. Strides in elements.

    origin: "given", one of the call's arrays, by its `key`; "made", a `result` of an earlier
    launch: number of the launch, of the output; "numbers", then `contents` has them, also those
    that lie behind a view.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    origin: str
    key: str = ""
    result: tuple[int, int] = (0, 0)
    contents: Any = None


class Parameter(NamedTuple):
    """One of a kernel's, in its order. kind: "pointer", "shape", "strides" or "ndim"."""

    kind: str
    name: str


@dataclass(frozen=True)
class Launch:
    """A kernel, what its parameters are, and the arrays behind their names."""

    kernel: Kernel
    parameters: tuple[Parameter, ...]
    arrays: dict[str, Array]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Of the grid. MLX counts it in threads, and makes a block no larger than it."""
        sizes = zip(self.kernel.grid, self.threads, strict=True)
        x, y, z = (ceil(threads / size) for threads, size in sizes)
        return x, y, z

    @property
    def threads(self) -> tuple[int, int, int]:
        x, y, z = map(min, self.kernel.grid, self.kernel.threadgroup)
        return x, y, z


Given = dict[str, mx.array]


def stand_ins(shape: Shape) -> Given:
    """The arrays of a call by name, of the true shapes and strides, on a single number each.

    A cache has as many pages as the sequences need.
    """
    dtype = getattr(mx, shape.dtype)
    rank, rope = shape.geometry
    rows = (shape.batch, shape.heads, shape.q_len)
    pages = blocks_of(shape)
    return {
        "q_nope": _hollow((*rows, rank), dtype),
        "q_pe": _hollow((*rows, rope), dtype),
        "latent": _hollow((sum(pages), BLOCK_SIZE, shape.geometry.width), dtype),
        "block_table": _hollow((shape.batch, max(pages)), mx.int32),
    }


def launches_of(plan: Plan, shape: Shape, given: Given, scale: float) -> list[Launch]:
    """What MLX would launch for a paged call on those arrays.

    Raises:
        ValueError: the back end passes what isn't known here.
    """
    cache = PagedCache(given["latent"], given["block_table"], shape.all_lengths)
    starts, ticket = (0,) * shape.batch, backends.next_ticket()
    lengths = shape.all_lengths
    call = Call(given["q_nope"], given["q_pe"], cache, scale, shape, lengths, starts, ticket)
    with _noted() as notes:
        cuda_backend.CudaBackend().run(plan, call)
    return [_launch(i, notes, given) for i in range(len(notes.kernels))]


@contextmanager
def texts_from(folder: Path | None) -> Iterator[None]:
    """While it is open the kernels' texts come from another folder than `shaders/`."""
    folders = shaders._FOLDERS
    if folder is not None:
        if not (folder / "cuda").is_dir():
            raise ValueError(f"expected a folder of shaders with cuda/ in it; got {folder}")
        shaders._FOLDERS = (folder.resolve(),)  # type: ignore[assignment]
    _forget(shaders)
    try:
        yield
    finally:
        shaders._FOLDERS = folders
        _forget(shaders)


def _forget(module: ModuleType) -> None:
    """Clears what a module's functions remember: texts, or arrays that were made unseen."""
    for each in vars(module).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def _hollow(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return mx.as_strided(mx.zeros((1,), dtype), shape, strides)


class _Notes:
    """Kernels launched, with what each was given, and views with what they look at."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.given: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []  # of the outputs
        self.results: list[list[mx.array]] = []
        self.bases: dict[int, tuple[mx.array, mx.array]] = {}  # by id of the view, kept with it

    def base(self, array: mx.array) -> mx.array:
        _, base = self.bases.get(id(array), (array, array))
        return base


@contextmanager
def _noted() -> Iterator[_Notes]:
    """`recorded`, and beside each kernel what it was launched with."""
    _forget(cuda_backend)
    with recorded() as kernels:
        notes = _Notes(kernels)
        fast: Any = mx.fast
        core: Any = mx
        record, as_strided = fast.cuda_kernel, mx.as_strided

        def cuda_kernel(**made: Any) -> Callable[..., list[mx.array]]:
            launch = record(**made)

            def noting(**given: Any) -> list[mx.array]:
                results: list[mx.array] = launch(**given)
                notes.given.append(given)
                notes.names.append(tuple(made["output_names"]))
                notes.results.append(results)
                return results

            return noting

        def noting_strided(array: mx.array, *how: Any, **named: Any) -> mx.array:
            if named.get("offset") or len(how) > 2:
                raise ValueError("an offset of mx.as_strided is not known here")
            view = as_strided(array, *how, **named)
            notes.bases[id(view)] = view, notes.base(array)
            return view

        fast.cuda_kernel, core.as_strided = cuda_kernel, noting_strided
        try:
            yield notes
        finally:
            fast.cuda_kernel, core.as_strided = record, as_strided


def _launch(index: int, notes: _Notes, given: Given) -> Launch:
    kernel, passed = notes.kernels[index], notes.given[index]
    arrays = {
        name: _array(name, array, notes, given)
        for name, array in zip(kernel.inputs, passed["inputs"], strict=True)
    }
    outputs = tuple(
        (name, tuple(shape), _dtype_name(dtype))
        for name, shape, dtype in zip(
            notes.names[index], passed["output_shapes"], passed["output_dtypes"], strict=True
        )
    )
    known = (*kernel.inputs, *notes.names[index])
    return Launch(kernel, parameters_of(kernel, known), arrays, outputs)


def _array(name: str, array: mx.array, notes: _Notes, given: Given) -> Array:
    dtype, strides = _dtype_name(array.dtype), strides_of(array)
    for key, known in given.items():
        if notes.base(array) is known:
            return Array(dtype, array.shape, strides, "given", key=key)
    for i, results in enumerate(notes.results):
        for j, result in enumerate(results):
            if notes.base(array) is result:
                return Array(dtype, array.shape, strides, "made", result=(i, j))
    base = notes.base(array)
    if base.size > MOST_NUMBERS:
        raise ValueError(f"{name} is no array of the call, and too large to be its numbers")
    return Array(dtype, array.shape, strides, "numbers", contents=np.array(base))


def strides_of(array: mx.array) -> tuple[int, ...]:
    """In elements; evaluates the array, which for a view reads nothing."""
    numbers: Any = array  # MLX's stubs don't say that it is a buffer
    view = memoryview(numbers)
    return tuple(stride // view.itemsize for stride in view.strides or ())


def parameters_of(kernel: Kernel, names: Sequence[str]) -> tuple[Parameter, ...]:
    """A kernel's parameters as its text lists them.

    Raises:
        ValueError: one of them belongs to no array of those names.
    """
    declared = re.search(rf"__global__ void {kernel.name}\(([^)]*)\)\s*\{{", kernel.text)
    if declared is None:
        raise ValueError(f"the text declares no kernel {kernel.name}")
    found = [_parameter(each.split()[-1], each, names) for each in declared[1].split(",")]
    return tuple(found)


def _parameter(word: str, declaration: str, names: Sequence[str]) -> Parameter:
    if "*" in declaration and word in names:
        return Parameter("pointer", word)
    for kind in ("shape", "strides", "ndim"):
        if word.removesuffix(f"_{kind}") in names and word.endswith(f"_{kind}"):
            return Parameter(kind, word.removesuffix(f"_{kind}"))
    raise ValueError(f"a kernel's parameter belongs to no array: {declaration.strip()}")


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
