"""NVIDIA GPUs: the plain MLX paths, and our kernels, which MLX compiles from text on the device."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from math import e, log2, prod
from typing import Any

import mlx.core as mx

from .. import device
from ..caches import PagedCache
from ..errors import DeviceError
from ..shapes import DTYPE_BYTES, Shape
from . import Call, cuda_tiles
from .jit import DTYPES, JitBackend, Kernel, Pass, count, leading
from .native import load
from .shaders import Text, folder, text

_PROVEN = (Shape(300, 1, 16), Shape(300, 1, 128))  # rows of the usual defaults
_LARGEST = 3.4028234663852886e38  # that a float32 holds
_OUTPUTS = ("out", "lse")
_IMPLIED = ("BITS", "SHARED")  # constants of a kernel that need no place in its name
_KERNELS = ("small", "wide", "portable", "simple", "merge")  # each a file below shaders/cuda
_async_eval: Any = mx.async_eval  # MLX's stubs give it no types
_PLAIN = re.compile(r"[^\"\\\n\r]+")  # a path that C++ can name as it is


class CudaBackend(JitBackend):
    """Launches native plans through `mx.fast.cuda_kernel`."""

    _lse_apart = True
    _proven_length = 2112  # short sequences take another way, see FEW_TOKENS in half.cuh

    def __init__(self) -> None:
        super().__init__("cuda", "CUDA", _PROVEN)
        self._kernels: dict[str, Kernel] = {}
        self._asked: tuple[tuple[object, ...], mx.array] | None = None  # the last numbers
        self._native = load(lambda native: native.GpuLaunch).native
        self._native_launches = self._native is not None

    def signature(self, *arrays: mx.array | None) -> Hashable:
        if self._native is None:
            return super().signature(*arrays)
        key: bytes = self._native.signature(*arrays)
        return key

    def _missing(self) -> str:
        if not mx.cuda.is_available():
            return f"this MLX ({device.MLX_VERSION}) has no CUDA back end"
        if self._gpu is None:
            return "no NVIDIA GPU or no driver is here"
        if self._capability < cuda_tiles.OLDEST:
            return f"the kernels need sm_{cuda_tiles.OLDEST}; got {self._gpu.architecture}"
        if not _PLAIN.fullmatch(str(folder("cuda"))):
            return f"mla-tuner lies in a folder that C++ can't name: {str(folder('cuda'))!r}"
        return ""

    @cached_property
    def _gpu(self) -> device.Device | None:
        try:
            return device.probe("cuda")
        except DeviceError:
            return None

    @cached_property
    def _capability(self) -> int:
        return cuda_tiles.capability(self._gpu.architecture) if self._gpu else 0

    def _read(self) -> dict[str, Text]:
        """One text for all: any kernel may include any of the headers."""
        headers = (f"cuda/{path.name}" for path in sorted(folder("cuda").glob("*.cuh")))
        bodies = (f"cuda/{kernel}.cu" for kernel in _KERNELS)
        return {"all": text((*headers, *bodies), f"cuda/{_KERNELS[0]}.cu")}

    def _useful(self, shape: Shape) -> tuple[str, ...]:
        return cuda_tiles.useful(shape, self._capability)

    def _illegal(self, name: str, shape: Shape) -> str | None:
        return cuda_tiles.refusal(name, shape, self._capability)

    def _piece(self, shape: Shape, partitions: int) -> int:
        return cuda_tiles.piece_of(shape, partitions)

    def _decode(self, name: str, shape: Shape, piece: int) -> tuple[Pass, dict[str, object]]:
        """One kernel, whatever the pieces: partial answers are floats, in numbers of the caller's
        dtype.
        """
        tile, pieces, rank = cuda_tiles.TILES[name], count(shape, piece), _rank(shape)
        shapes: list[tuple[int, ...]] = [(*leading(shape, 1), rank), leading(shape, 1)]
        if pieces > 1:  # with sums of each row
            width = (rank + 4) * 4 // DTYPE_BYTES[shape.dtype]
            shapes = [(*leading(shape, pieces), width)]
        grid = cuda_tiles.grid(tile, shape, piece)
        launch = {
            "grid": grid,
            "threadgroup": (tile.threads, 1, 1),
            **_outputs(shapes, shape.dtype),
        }
        facts = {
            "kernel": tile.kernel,
            "threads": tile.threads,
            "blocks": prod(grid) // tile.threads,
            "pieces": pieces,
            "piece_tokens": piece,
        }
        return self._pass(launch, _tile_text(tile, shape, len(shapes))), facts

    def _merge(self, shape: Shape, piece: int, want_lse: bool) -> Pass:
        whole, cores = leading(shape, 1), self._gpu.cores if self._gpu else None
        shapes = [(*whole, _rank(shape)), *[whole] * want_lse]
        launch = {
            "grid": cuda_tiles.merge_grid(shape, count(shape, piece), cores),
            "threadgroup": (cuda_tiles.MERGE_THREADS, 1, 1),
            **_outputs(shapes, shape.dtype),
        }
        return self._pass(launch, _merge_text(shape, len(shapes)))

    def _joined(self, decode: Pass, merge: Pass | None) -> Callable[..., Sequence[mx.array]]:
        """By `_native` where it is built, which takes less time."""
        if self._native_launches:
            passes = (
                each and self._native.Pass(**(each.making or {}), **each.launch)
                for each in (decode, merge)
            )
            try:
                call: Callable[..., Sequence[mx.array]] = self._native.GpuLaunch(*passes)
                return call
            except RuntimeError:  # a libmlx without CUDA
                self._native_launches = False
        if merge is None:
            return lambda *inputs: decode(inputs)
        return lambda *inputs: merge([*decode(inputs), inputs[-1]])

    def _inputs(self, call: Call, piece: int) -> list[mx.array]:
        """In the order of `_tile_text`; what a kernel doesn't read isn't passed."""
        q_nope, q_pe, cache, scale, shape, lengths, starts, _, _ = call
        latent = cache.latent
        inputs = [q_nope, latent] if q_pe is None else [q_nope, q_pe, latent]
        blocks, block_size = 1, 1 << 30
        if isinstance(cache, PagedCache):
            blocks, block_size, _ = latent.shape
            inputs.append(cache.block_tables)
        elif q_pe is not None and cache.k_pe is not None:
            inputs.append(cache.k_pe)
        asked = piece, scale, shape, block_size, blocks, starts, lengths
        last = self._asked  # by the layers of a step: the same objects
        if last is None or last[0] != asked:
            numbers = shape.rows, shape.q_len, block_size, blocks
            last = self._asked = asked, _info(piece, scale, numbers, starts, lengths)
        inputs.append(last[1])
        return inputs

    def _pass(self, launch: dict[str, Any], making: dict[str, Any]) -> Pass:
        """One kernel for all calls on such arrays: lengths, strides and partitions don't count."""
        name = str(making["name"])
        if name not in self._kernels:
            made: Any = mx.fast.cuda_kernel(**making, ensure_row_contiguous=False)  # a copy, else
            self._kernels[name] = made
        return Pass(self._kernels[name], launch, making)


def _outputs(shapes: list[tuple[int, ...]], dtype: str) -> dict[str, Any]:
    """Of a launch: the first in that dtype, an LSE in float32."""
    return {
        "output_shapes": shapes,
        "output_dtypes": [DTYPES[dtype], mx.float32][: len(shapes)],
    }


def _tile_text(tile: cuda_tiles.Tile, shape: Shape, outputs: int) -> dict[str, Any]:
    rope, paged = shape.geometry.rope_dim > 0, shape.layout == "paged"
    beside = "block_table" if paged else "k_pe" if rope else ""
    inputs = ("q_nope", "q_pe" if rope else "", "latent", beside, "info")
    given = ", ".join(f"{n}, {n}_strides" if n else "nullptr, info_strides" for n in inputs)
    names = tuple(filter(None, inputs)), outputs
    return _text(tile.kernel, tile.defines(shape), names, f"run({given}", tile.threads)


def _merge_text(shape: Shape, outputs: int) -> dict[str, Any]:
    defines, names = cuda_tiles.merge_defines(shape), (("part", "info"), outputs)
    call = "merge(part, part_shape, info, info_strides"
    return _text("merge", defines, names, call, cuda_tiles.MERGE_THREADS, together=4)


def _text(
    kernel: str,
    defines: dict[str, int | str],
    names: tuple[tuple[str, ...], int],
    call: str,
    threads: int,
    together: int = 1,
) -> dict[str, Any]:
    """What `mx.fast.cuda_kernel` makes a kernel of; it is compiled when it first runs.

    names: of the inputs, and how many outputs: each costs the host a microsecond or two.

    MLX builds the text anew at every call and hashes it at every evaluation, 0.25 us a KB on one
    H200's host (MLX 0.32.4, 2026-11-29): so it only names the file where the kernel is.

    Without launch bounds, `together` blocks of `threads` on a core, a compiler leaves registers for
    1024 threads. MLX has no place for them, so they are put in front of the kernel's name, which
    MLX makes of ours.
    """
    inputs, outputs = names
    # BITS follows from HALF, SHARED from the others: a shorter name is hashed sooner.
    values = (str(value).strip('"') for key, value in defines.items() if key not in _IMPLIED)
    name = "_".join(["mla", kernel, str(outputs), *values])
    full = f"custom_kernel_{name}"
    lines = (
        *(f"#define {key} {value}" for key, value in defines.items()),
        f'#include "{folder("cuda") / kernel}.cu"',
        f"#define {full} __launch_bounds__({threads}, {together}) {full}\n",
    )
    return {
        "name": name,
        "input_names": inputs,
        "output_names": _OUTPUTS[:outputs],
        "header": "\n".join(lines),
        "source": f"#undef {full}\nmla::{call}, out, {'lse' if outputs > 1 else 'nullptr'});",
        "shared_memory": int(defines.get("SHARED", 0)),
    }


def _rank(shape: Shape) -> int:
    return shape.geometry.kv_lora_rank


# The layers of a step pass the same numbers: one array serves them all.
@lru_cache(maxsize=64)
def _info(
    piece: int,
    scale: float,
    numbers: tuple[int, ...],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
) -> mx.array:
    """Every number that the kernels need beside the arrays, as `work` in base.cuh reads them.

    MLX passes an array's strides as parameters of the kernel, and those are there when it starts,
    where a number in memory takes most of a microsecond. So the numbers of the call are strides of
    dimensions of one element. Behind the pointer lie, where sequences differ, four numbers of each
    piece (sequence, number, the sequence's start and tokens), then each sequence's pieces.
    """
    counts = tuple(length - start for start, length in zip(starts, lengths, strict=True))
    room, listed = max(1, -(-max(counts) // piece)), []
    if len(set(zip(starts, counts, strict=True))) > 1:
        # In the order of the grid, see cuda_tiles.grid: by sequence where all have as many tokens.
        work = cuda_tiles.work_list(counts, piece)
        work = sorted(work) if len(set(counts)) == 1 else work
        listed = [number for b, at in work for number in (b, at, starts[b], counts[b])]
    strides = (piece, _bits(scale * log2(e)), *numbers, room, starts[0], counts[0])
    strides = (*strides, len(listed) // 4)
    listed += [-(-tokens // piece) for tokens in counts] if listed else []
    # What the host makes, and all of up to 8 bytes, lies where each block would read it over the
    # bus (split kernel 8.5 -> 30.5 us on one H200, MLX 0.32.4, 2026-11-29). A result doesn't.
    array = mx.concatenate([mx.array([*listed, 0], mx.int32), mx.zeros(8, mx.int32)])
    array = mx.as_strided(array, (1,) * len(strides), strides)  # MLX allows 10 dimensions
    # A lazy array can be evaluated by the thread that made it alone, and this one is for all.
    _async_eval(array)
    return array


def _bits(value: float) -> int:
    """A float32 as the integer of the same bits."""
    held = max(-_LARGEST, min(_LARGEST, value))
    found: int = struct.unpack("<i", struct.pack("<f", held))[0]
    return found
