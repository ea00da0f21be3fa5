"""NVIDIA GPUs: the plain MLX paths, and our kernels, which MLX compiles from text on the device."""

from __future__ import annotations

import struct
from functools import cached_property, lru_cache, partial
from math import e, log2
from typing import Any

import mlx.core as mx

from .. import device
from ..caches import PagedCache
from ..errors import DeviceError
from ..shapes import DTYPE_BYTES, Shape
from . import Call, cuda_tiles
from .jit import DTYPES, JitBackend, Kernel, leading
from .shaders import Text, text
from .shorter import shorter

_PROVEN = (Shape(300, 1, 16), Shape(300, 1, 128))  # rows of the usual defaults
_LARGEST = 3.4028234663852886e38  # that a float32 holds
_OUTPUTS = ("out", "lse")
_HALF = ("base", "pack", "half")
# Files below shaders/cuda that a kernel is made of, its body last.
_FILES = {
    "small": (*_HALF, "tensor", "tile", "bulk", "small", "decode.body"),
    "wide": (*_HALF, "async", "bulk", "wgmma", "wide", "decode.body"),
    "portable": (*_HALF, "async", "tensor", "tile", "portable", "decode.body"),
    "simple": ("base", "simple", "decode.body"),
    "merge": ("base", "pack", "merge", "merge.body"),
    "merge32": ("base", "merge", "merge.body"),
}
Defines = dict[str, "int | str"]


class CudaBackend(JitBackend):
    """Launches native plans through `mx.fast.cuda_kernel`."""

    def __init__(self) -> None:
        super().__init__("cuda", "CUDA", _PROVEN)
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def _missing(self) -> str:
        if not mx.cuda.is_available():
            return f"this MLX ({device.MLX_VERSION}) has no CUDA back end"
        if self._gpu is None:
            return "no NVIDIA GPU or no driver is here"
        if self._capability < cuda_tiles.OLDEST:
            return f"the kernels need sm_{cuda_tiles.OLDEST}; got {self._gpu.architecture}"
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
        return {
            kernel: text(tuple(f"cuda/{name}.cuh" for name in header), f"cuda/{body}.cu")
            for kernel, (*header, body) in _FILES.items()
        }

    def _useful(self, shape: Shape) -> tuple[str, ...]:
        return cuda_tiles.useful(shape, self._capability)

    def _illegal(self, name: str, shape: Shape) -> str | None:
        return cuda_tiles.refusal(name, shape, self._capability)

    def _decode(self, name: str, shape: Shape, partitions: int) -> tuple[Kernel, dict[str, object]]:
        """One kernel, whatever the partitions: partial answers are floats, in numbers of the
        caller's dtype.
        """
        tile, lead, rank = cuda_tiles.TILES[name], leading(shape, partitions), _rank(shape)
        width = rank * 4 // DTYPE_BYTES[shape.dtype] if partitions > 1 else rank
        launch = partial(
            self._tile_kernel(tile, shape),
            grid=cuda_tiles.grid(tile, shape, partitions),
            threadgroup=(tile.threads, 1, 1),
            output_shapes=[(*lead, width), lead],
            output_dtypes=[DTYPES[shape.dtype], mx.float32],
        )
        return launch, {"kernel": tile.kernel, "threads": tile.threads}

    def _merge(self, shape: Shape, partitions: int) -> Kernel:
        rank, whole = _rank(shape), leading(shape, 1)
        cores = self._gpu.cores if self._gpu else None
        return partial(
            self._merge_kernel(shape),
            grid=cuda_tiles.merge_grid(shape, partitions, cores),
            threadgroup=(cuda_tiles.MERGE_THREADS, 1, 1),
            output_shapes=[(*whole, rank), whole],
            output_dtypes=[DTYPES[shape.dtype], mx.float32],
        )

    def _inputs(self, call: Call, piece: int) -> list[mx.array]:
        """In the order of `_tile_kernel`; what a kernel doesn't read isn't passed."""
        cache, shape, rope = call.cache, call.shape, call.q_pe is not None
        blocks, block_size, beside = 1, 1 << 30, None
        if isinstance(cache, PagedCache):
            blocks, block_size, _ = cache.latent.shape
            beside = cache.block_tables
        elif rope:
            beside = cache.k_pe
        numbers = (piece, shape.rows, shape.q_len, block_size, blocks)
        info = _info(numbers, call.scale, call.starts, call.lengths)
        arrays = call.q_nope, call.q_pe, cache.latent, beside, info
        return [array for array in arrays if array is not None]

    def _tile_kernel(self, tile: cuda_tiles.Tile, shape: Shape) -> Kernel:
        """For all calls on such arrays: lengths, strides and partitions are not in it."""
        key = tile, shape.dtype, shape.geometry, shape.layout
        if key not in self._kernels:
            rope, paged = shape.geometry.rope_dim > 0, shape.layout == "paged"
            beside = ["block_table"] if paged else ["k_pe"] * rope
            inputs = ("q_nope", *["q_pe"] * rope, "latent", *beside, "info")
            defines = tile.defines(shape)
            self._kernels[key] = self._made(tile.kernel, defines, inputs, tile.threads)
        return self._kernels[key]

    def _merge_kernel(self, shape: Shape) -> Kernel:
        key = "merge", shape.dtype, _rank(shape)
        if key not in self._kernels:
            kernel = "merge32" if shape.dtype == "float32" else "merge"
            defines, inputs = cuda_tiles.merge_defines(shape), ("part", "part_lse")
            self._kernels[key] = self._made(kernel, defines, inputs, cuda_tiles.MERGE_THREADS)
        return self._kernels[key]

    def _made(self, kernel: str, defines: Defines, inputs: tuple[str, ...], threads: int) -> Kernel:
        """Hands MLX a kernel's text; it is compiled when it first runs.

        Without launch bounds a compiler leaves registers for 1024 threads. MLX has no place for
        them, so they are put in front of the kernel's name, which MLX makes of ours.
        """
        values = "_".join(str(value).strip('"').replace(" ", "_") for value in defines.values())
        name = f"mla_{kernel}_{values}"
        full = f"custom_kernel_{name}"
        source = shorter(self._texts[0][kernel], {*defines, *inputs, *_OUTPUTS})
        lines = [f"#define {key} {value}\n" for key, value in defines.items()]
        bounds = f"#define {full} __launch_bounds__({threads}, 1) {full}\n"
        made: Any = mx.fast.cuda_kernel(
            name=name,
            input_names=inputs,
            output_names=_OUTPUTS,
            header="".join((*lines, source.header, bounds)),
            source=f"#undef {full}\n{source.body}",
            ensure_row_contiguous=False,  # a copy of the cache, else
            shared_memory=int(defines.get("SHARED", 0)),
        )
        kept: Kernel = made
        return kept


def _rank(shape: Shape) -> int:
    return shape.geometry.kv_lora_rank


# The layers of a step pass the same numbers: one array serves them all.
@lru_cache(maxsize=64)
def _info(
    head: tuple[int, ...], scale: float, starts: tuple[int, ...], lengths: tuple[int, ...]
) -> mx.array:
    """Every number that the kernels need beside the arrays, in one array."""
    piece, *rest = head
    numbers = [piece, _bits(scale * log2(e)), *rest]
    for start, length in zip(starts, lengths, strict=True):
        numbers += (start, length - start)
    # What the host makes, and all of up to 8 bytes, lies where each block would read it over the
    # bus (split kernel 8.5 -> 30.5 us on one H200, MLX 0.32.4, 2026-11-29). A result doesn't.
    return mx.concatenate([mx.array(numbers, mx.int32), mx.zeros(8, mx.int32)])


def _bits(value: float) -> int:
    """A float32 as the integer of the same bits."""
    held = max(-_LARGEST, min(_LARGEST, value))
    found: int = struct.unpack("<i", struct.pack("<f", held))[0]
    return found
