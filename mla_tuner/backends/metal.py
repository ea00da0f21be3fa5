"""Apple GPUs: the plain MLX paths, and our kernels, which MLX compiles from text on the device.

No kernel is trusted unseen. Before a tile runs for the first time on a dtype, geometry and layout,
it must give a known answer here; one that doesn't is refused with the reason, and MLX's paths run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import mlx.core as mx

from ..caches import PagedCache
from ..plan import Plan
from ..shapes import Shape, piece_tokens
from . import Call, metal_tiles
from .mlx_paths import MlxBackend
from .self_check import fault
from .shaders import Text, digest, text

Kernel = Callable[..., list[mx.array]]

# In the order of the kernels' arguments.
_INPUTS = ("q_nope", "q_pe", "latent", "k_pe", "block_table", "lengths", "starts", "piece", "scale")
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_PROVEN_DTYPES = ("bfloat16", "float16")  # what models decode in; others are proven at first use
_PROVEN_SHAPES = (Shape(300, 1, 4), Shape(300, 1, 8), Shape(300, 1, 16))  # rows of every default


class MetalBackend(MlxBackend):
    """Launches native plans through `mx.fast.metal_kernel`; compiles nothing before first use."""

    def __init__(self) -> None:
        super().__init__("metal")
        self._kernels: dict[str, Kernel] = {}
        self._proofs: dict[tuple[object, ...], str | None] = {}
        self._launched: tuple[int, Plan, dict[str, object]] | None = None

    def digest(self) -> str:
        return self._texts[1]

    def available(self) -> tuple[bool, str]:
        return self._able

    @cached_property
    def _able(self) -> tuple[bool, str]:
        if not mx.metal.is_available():
            return False, "no Metal device is here"
        if not hasattr(mx.fast, "metal_kernel"):
            return False, f"this MLX ({vars(mx)['__version__']}) has no mx.fast.metal_kernel"
        if not self._texts[1]:
            return False, "the Metal kernels' texts are not installed: reinstall mla-tuner"
        return True, ""

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return metal_tiles.useful(shape) if self._able[0] else ()

    def refusal(self, plan: Plan, shape: Shape) -> str | None:
        if not plan.native:
            return super().refusal(plan, shape)
        return self._disproof(plan.tile or metal_tiles.useful(shape)[0], plan.partitions > 1, shape)

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        if not plan.native:
            return super().run(plan, call)
        shape = call.shape
        name = plan.tile or metal_tiles.useful(shape)[0]
        ran = Plan(plan.path, plan.partitions, name).cut(shape.context)
        out, lse = self._decode(metal_tiles.TILES[name], ran.partitions, call)
        facts: dict[str, object] = {
            "kernel": metal_tiles.TILES[name].kernel,
            "threads": metal_tiles.TILES[name].threads(shape.geometry),
            "launches": 2 if ran.partitions > 1 else 1,
        }
        self._launched = call.ticket, ran, facts
        return out, lse

    def executed(self, ticket: int) -> Plan | None:
        """What was put into the graph for that call: evaluating the result runs it."""
        launched = self._launched
        return launched[1] if launched is not None and launched[0] == ticket else None

    def detail(self, ticket: int) -> dict[str, object]:
        launched = self._launched
        return launched[2] if launched is not None and launched[0] == ticket else {}

    def self_check(self) -> tuple[bool, str]:
        return self._self_checked

    @cached_property
    def _self_checked(self) -> tuple[bool, str]:
        if not self._able[0]:
            return self._able
        for dtype in _PROVEN_DTYPES:
            for shape in _PROVEN_SHAPES:
                shape = Shape(shape.context, 1, shape.heads, dtype)
                for split in (False, True):
                    found = self._disproof(metal_tiles.useful(shape)[0], split, shape)
                    if found:
                        return False, found
        return True, "the Metal kernels agree with mlx_rows"

    def _disproof(self, name: str, split: bool, shape: Shape) -> str | None:
        """Why a tile can't run here or must not be trusted; None once it gave the right answer."""
        key = name, split, shape.dtype, shape.geometry, shape.layout
        if key not in self._proofs:
            reason = None if self._able[0] else self._able[1]
            reason = reason or metal_tiles.refusal(name, shape)
            self._proofs[key] = reason or self._tried(name, split, shape)
        return self._proofs[key]

    def _tried(self, name: str, split: bool, shape: Shape) -> str | None:
        plan = Plan("split", 3, name) if split else Plan("single", 1, name)
        try:
            found = self._lane_fault if metal_tiles.TILES[name].kernel == "matrix" else None
            found = found or fault(self, plan, shape.dtype, shape.geometry, shape.layout)
        except Exception as error:  # a compile error, too many threads, no memory: serving goes on
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return f"tile {name} failed its check here: {found}" if found else None

    @cached_property
    def _lane_fault(self) -> str | None:
        """Whether a lane holds the elements of an 8 x 8 matrix that the matrix kernel expects."""
        (seen,) = self._kernel("lanes")(
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

    def _decode(
        self, tile: metal_tiles.Tile, partitions: int, call: Call
    ) -> tuple[mx.array, mx.array | None]:
        """One pass over the cache; with several partitions, their merge."""
        shape, geometry = call.shape, call.shape.geometry
        dtype, split = _DTYPES[shape.dtype], partitions > 1
        rank, whole = geometry.kv_lora_rank, (shape.batch, shape.heads, shape.q_len)
        lead = (shape.batch, partitions, shape.rows) if split else whole
        part = mx.float32 if split else dtype
        template = [
            *(("T", dtype), ("Out", part), ("RANK", rank), ("ROPE", geometry.rope_dim)),
            *((key, _value(value)) for key, value in tile.template(geometry, shape.dtype)),
            ("PAGED", shape.layout == "paged"),
        ]
        out, lse = self._kernel(tile.kernel)(
            inputs=_inputs(call, partitions),
            template=template,
            grid=metal_tiles.grid(tile, shape, partitions),
            threadgroup=(tile.threads(geometry), 1, 1),
            output_shapes=[(*lead, rank), lead],
            output_dtypes=[part, mx.float32],
        )
        if split:
            out, lse = self._kernel("reduce")(
                inputs=[out, lse],
                template=[("T", dtype), ("RANK", rank)],
                grid=metal_tiles.merge_grid(shape),
                threadgroup=(rank // 4, 1, 1),
                output_shapes=[(*whole, rank), whole],
                output_dtypes=[dtype, mx.float32],
            )
        return out, lse

    @cached_property
    def _texts(self) -> tuple[dict[str, Text], str]:
        """The kernels' texts by name, and the digest of those that compute; "" where none are."""
        try:
            texts = {
                "matrix": text(
                    ("metal/common.metal", "metal/matrix.metal"), "metal/matrix.body.metal"
                ),
                "vector": text(
                    ("metal/common.metal", "metal/vector.metal"), "metal/vector.body.metal"
                ),
                "reduce": text((), "metal/reduce.body.metal"),
                "lanes": text((), "metal/lanes.body.metal"),
            }
        except OSError:
            return {}, ""
        return texts, digest(texts[name] for name in ("matrix", "vector", "reduce"))

    def _kernel(self, name: str) -> Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            inputs, outputs = _SIGNATURES.get(name, (_INPUTS, ("out", "lse")))
            source = self._texts[0][name]
            made: Any = mx.fast.metal_kernel(
                name=f"mla_{name}",
                input_names=inputs,
                output_names=outputs,
                header=source.header,
                source=source.body,
                ensure_row_contiguous=False,  # a copy of the cache, else
            )
            kernel = self._kernels[name] = made
        return kernel


_SIGNATURES = {
    "reduce": (("part", "part_lse"), ("out", "lse")),
    "lanes": (("zero",), ("seen",)),
}


def _value(value: int | bool | str) -> Any:
    return _DTYPES[value] if isinstance(value, str) else value


def _inputs(call: Call, partitions: int) -> list[mx.array]:
    cache, shape = call.cache, call.shape
    if isinstance(cache, PagedCache):
        k_pe, table = cache.latent, cache.block_tables
    else:
        k_pe, table = cache.k_pe if cache.k_pe is not None else cache.latent, _no_table()
    piece = piece_tokens(shape.context, partitions)
    return [
        call.q_nope,
        call.q_pe if call.q_pe is not None else call.q_nope,  # not read where rope_dim is 0
        *(cache.latent, k_pe, table),
        *(_ints(call.lengths), _ints(call.starts), _int(piece), _float(call.scale)),
    ]


# The layers of a step pass the same numbers: one array serves them all.
@lru_cache(maxsize=64)
def _ints(values: tuple[int, ...]) -> mx.array:
    return mx.array(values, mx.int32)


@lru_cache(maxsize=64)
def _int(value: int) -> mx.array:
    return mx.array(value, mx.int32)


@lru_cache(maxsize=64)
def _float(value: float) -> mx.array:
    return mx.array(value, mx.float32)


@lru_cache(maxsize=1)
def _no_table() -> mx.array:
    return mx.zeros(8, mx.int32)
