"""Apple GPUs: the plain MLX paths, and our kernels, which MLX compiles from text on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx

from ..caches import PagedCache
from ..shapes import Shape
from . import Call, metal_tiles
from .jit import DTYPES, JitBackend, Kernel, Pass, count, leading
from .shaders import Text, text

# In the order of the kernels' arguments.
_INPUTS = ("q_nope", "q_pe", "latent", "k_pe", "block_table", "lengths", "starts", "piece", "scale")
_OUTPUTS = ("out", "lse")
_SHORT = 8  # elements
_PROVEN = (Shape(300, 1, 4), Shape(300, 1, 8), Shape(300, 1, 16))  # rows of every default


class MetalBackend(JitBackend):
    """Launches native plans through `mx.fast.metal_kernel`."""

    def __init__(self) -> None:
        super().__init__("metal", "Metal", _PROVEN)
        self._kernels: dict[str, Kernel] = {}

    def _missing(self) -> str:
        return "" if mx.metal.is_available() else "no Metal device is here"

    def _read(self) -> dict[str, Text]:
        common = "metal/common.metal"
        return {
            "matrix": text((common, "metal/matrix.metal"), "metal/matrix.body.metal"),
            "vector": text((common, "metal/vector.metal"), "metal/vector.body.metal"),
            "reduce": text((), "metal/reduce.body.metal"),
        }

    def _useful(self, shape: Shape) -> tuple[str, ...]:
        return metal_tiles.useful(shape)

    def _illegal(self, name: str, shape: Shape) -> str | None:
        return metal_tiles.refusal(name, shape)

    def _device_fault(self, name: str) -> str | None:
        return self._lane_fault if metal_tiles.TILES[name].kernel == "matrix" else None

    @cached_property
    def _lane_fault(self) -> str | None:
        """Whether a lane holds the elements of an 8 x 8 matrix that the matrix kernel expects."""
        source = text((), "metal/lanes.body.metal")
        (seen,) = _made("lanes", source, ("zero",), ("seen",))(
            inputs=[mx.zeros(8)],
            grid=(metal_tiles.LANES, 1, 1),
            threadgroup=(metal_tiles.LANES, 1, 1),
            output_shapes=[(metal_tiles.LANES, 2)],
            output_dtypes=[mx.float32],
        )
        lanes = range(metal_tiles.LANES)
        first = [8 * ((n >> 2 & 4) | (n >> 1 & 3)) + 2 * ((n >> 2 & 2) | (n & 1)) for n in lanes]
        if seen.tolist() == [[float(n), float(n + 1)] for n in first]:
            return None
        return "this GPU lays out its 8 x 8 matrices in another way"

    def _decode(self, name: str, shape: Shape, piece: int) -> tuple[Pass, dict[str, object]]:
        tile, geometry, partitions = metal_tiles.TILES[name], shape.geometry, count(shape, piece)
        dtype, lead = DTYPES[shape.dtype], leading(shape, partitions)
        part = mx.float32 if partitions > 1 else dtype
        template = [
            *(("T", dtype), ("Out", part)),
            *(("RANK", geometry.kv_lora_rank), ("ROPE", geometry.rope_dim)),
            *((key, _value(value)) for key, value in tile.template(geometry, shape.dtype)),
            ("PAGED", shape.layout == "paged"),
        ]
        threads = tile.threads(geometry)
        launch = {
            "template": template,
            "grid": metal_tiles.grid(tile, shape, partitions),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [(*lead, geometry.kv_lora_rank), lead],
            "output_dtypes": [part, mx.float32],
        }
        facts = {"kernel": tile.kernel, "threads": threads}
        return Pass(self._kernel(tile.kernel, _INPUTS), launch), facts

    def _merge(self, shape: Shape, piece: int, want_lse: bool) -> Pass:
        dtype, rank, whole = DTYPES[shape.dtype], shape.geometry.kv_lora_rank, leading(shape, 1)
        launch = {
            "template": [("T", dtype), ("RANK", rank)],
            "grid": metal_tiles.merge_grid(shape),
            "threadgroup": (rank // 4, 1, 1),
            "output_shapes": [(*whole, rank), whole],
            "output_dtypes": [dtype, mx.float32],
        }
        return Pass(self._kernel("reduce", ("part", "part_lse")), launch)

    def _joined(self, decode: Pass, merge: Pass | None) -> Callable[..., Sequence[mx.array]]:
        if merge is None:
            return lambda *inputs: decode(inputs)
        return lambda *inputs: merge(decode(inputs))

    def _inputs(self, call: Call, piece: int) -> list[mx.array]:
        """MLX puts what has fewer than 8 elements into another address space, which would be
        another text: one that was never proven. So nothing here has.
        """
        cache, numbers = call.cache, _numbers(call.lengths, call.starts, piece, call.scale)
        q_nope, q_pe, latent = call.q_nope, call.q_pe, cache.latent
        if not latent.size:  # a dense buffer without tokens: nobody reads this
            latent = mx.zeros((1, 1, 8, latent.shape[-1]), latent.dtype)
        k_pe, table = latent, _no_table()
        if isinstance(cache, PagedCache):
            table = cache.block_tables
            if table.size < _SHORT:
                table = mx.pad(table, [(0, 0), (0, _SHORT)])
        elif cache.k_pe is not None and cache.k_pe.size:
            k_pe = cache.k_pe
        return [q_nope, q_nope if q_pe is None else q_pe, latent, k_pe, table, *numbers]

    def _kernel(self, name: str, inputs: tuple[str, ...]) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = _made(name, self._texts[0][name], inputs, _OUTPUTS)
        return self._kernels[name]


def _made(name: str, source: Text, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Kernel:
    """Hands MLX a kernel's text; it is compiled when it first runs."""
    kernel: Any = mx.fast.metal_kernel(
        name=f"mla_{name}",
        input_names=inputs,
        output_names=outputs,
        header=source.header,
        source=source.body,
        ensure_row_contiguous=False,  # a copy of the cache, else
    )
    made: Kernel = kernel
    return made


def _value(value: int | bool | str) -> Any:
    return DTYPES[value] if isinstance(value, str) else value


# The layers of a step pass the same numbers: one set of arrays serves them all.
@lru_cache(maxsize=64)
def _numbers(
    lengths: tuple[int, ...], starts: tuple[int, ...], piece: int, scale: float
) -> tuple[mx.array, ...]:
    none = (0,) * _SHORT
    return (
        *(mx.array((*lengths, *none), mx.int32), mx.array((*starts, *none), mx.int32)),
        *(mx.array(piece, mx.int32), mx.array(scale, mx.float32)),
    )


@lru_cache(maxsize=1)
def _no_table() -> mx.array:
    return mx.array((0,) * _SHORT, mx.int32)  # host memory: a lazy result belongs to its thread
