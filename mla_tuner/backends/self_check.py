"""One small call that a native kernel must get right on a machine before it is trusted there."""

from __future__ import annotations

import zlib

import mlx.core as mx

from ..caches import Cache, DenseCache, PagedCache
from ..plan import Plan
from ..shapes import DEEPSEEK, Geometry, Shape
from . import Backend, Call, next_ticket
from .mlx_paths import run_mlx_rows

# Largest relative error of a whole output; wrong kernels miss it by far.
_BOUND = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
_LSE_BOUND = 1e-3
_LENGTHS = (300, 70)  # the longer one makes several pieces, neither is a multiple of any tile
_STARTS = (0, 7)  # where the layout has them
_HEADS, _Q_LEN = 20, 2  # 40 rows: full tiles and one that is not


def fault(
    backend: Backend,
    plan: Plan,
    dtype: str,
    geometry: Geometry = DEEPSEEK,
    layout: str = "paged",
) -> str | None:
    """What is wrong with one run of the plan, measured against `mlx_rows` in float32 on the CPU;
    None if it is right. A launch that never ran leaves old memory or zeros, which are wrong.

    Raises whatever the back end raises.
    """
    # Every plan has numbers of its own: memory may still hold the right answer of another one.
    seed = zlib.crc32(f"{plan} {dtype} {geometry} {layout}".encode())
    call = _call(dtype, geometry, layout, seed)
    out, lse = backend.run(plan, call)
    launched = backend.executed(call.ticket)  # a GPU back end knows at once, a CPU's after the run
    mx.eval(out, lse)
    with mx.stream(mx.cpu):  # a GPU may multiply float32 as TF32
        want, want_lse = run_mlx_rows(_widened(call))
        assert lse is not None
        assert want_lse is not None
        error = _number(mx.linalg.norm(out - want) / mx.linalg.norm(want))
        lse_error = _number(mx.abs(lse - want_lse).max())
    ran = launched or backend.executed(call.ticket)
    asked = plan.cut(max(_LENGTHS))
    if ran is None or (ran.path, ran.partitions) != (asked.path, asked.partitions):
        return f"asked for {asked}, {ran} ran"
    if not (error <= _BOUND[dtype] and lse_error <= _LSE_BOUND):  # NaN fails, too
        return f"{plan} in {dtype} is wrong by {error:.1e}, LSE by {lse_error:.1e}"
    return None


def _number(array: mx.array) -> float:
    return float(array)


def _call(dtype: str, geometry: Geometry, layout: str, seed: int) -> Call:
    """A small ragged call: 2 sequences, 20 heads, 2 query tokens."""
    keys = iter(mx.random.split(mx.random.key(seed), 4))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(getattr(mx, dtype))

    rank, rope = geometry
    batch, starts = len(_LENGTHS), _STARTS if layout == "dense" else (0, 0)
    cache: Cache
    if layout == "paged":
        table = mx.arange(38, dtype=mx.int32).reshape(batch, 19)
        cache = PagedCache(normal(38, 16, geometry.width), table, _LENGTHS)
    else:
        k_pe = normal(batch, 1, max(_LENGTHS), rope) if rope else None
        cache = DenseCache(normal(batch, 1, max(_LENGTHS), rank), k_pe, _LENGTHS, starts)
    contexts = tuple(n - start for n, start in zip(_LENGTHS, starts, strict=True))
    shape = Shape(max(contexts), batch, _HEADS, dtype, geometry, _Q_LEN, layout, contexts)
    q_nope = normal(batch, _HEADS, _Q_LEN, rank)
    q_pe = normal(batch, _HEADS, _Q_LEN, rope) if rope else None
    return Call(q_nope, q_pe, cache, 0.05, shape, _LENGTHS, starts, next_ticket(), want_lse=True)


def _widened(call: Call) -> Call:
    """The same numbers in float32."""
    cache = call.cache
    latent = cache.latent.astype(mx.float32)
    if isinstance(cache, PagedCache):
        wide: Cache = PagedCache(latent, cache.block_tables, cache.lengths)
    else:
        k_pe = None if cache.k_pe is None else cache.k_pe.astype(mx.float32)
        wide = DenseCache(latent, k_pe, cache.lengths, cache.starts)
    q_pe = None if call.q_pe is None else call.q_pe.astype(mx.float32)
    return call._replace(q_nope=call.q_nope.astype(mx.float32), q_pe=q_pe, cache=wide)
