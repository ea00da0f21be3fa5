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
LENGTH = max(_LENGTHS)  # of the sequences of an even batch
_HEADS, _Q_LEN = 20, 2  # 40 rows: full tiles and one that is not


def fault(
    backend: Backend,
    plan: Plan,
    dtype: str,
    geometry: Geometry = DEEPSEEK,
    layout: str = "paged",
    length: int = LENGTH,
    want_lse: bool = True,
) -> str | None:
    """What is wrong with a run of the plan, measured against `mlx_rows` in float32 on the CPU; None
    if two are right. A launch that never ran leaves old memory or zeros, which are wrong.

    length: of the sequences of the even run. want_lse: the ragged one has its LSE proven, too.

    Raises whatever the back end raises.
    """
    # Every plan has numbers of its own: memory may still hold the right answer of another one.
    seed = zlib.crc32(f"{plan} {dtype} {geometry} {layout} {want_lse}".encode())
    # Serving often has sequences of one length: other code, on a GPU.
    for i, lengths in enumerate(((length,) * len(_LENGTHS), _LENGTHS)):
        call = _call(dtype, geometry, layout, seed + i, lengths)
        found = _fault(backend, plan, call._replace(want_lse=want_lse and i > 0))
        if found:
            return found
    return None


def _fault(backend: Backend, plan: Plan, call: Call) -> str | None:
    out, lse = backend.run(plan, call)
    launched = backend.executed(call.ticket)  # a GPU back end knows at once, a CPU's after the run
    mx.eval(out) if lse is None else mx.eval(out, lse)
    with mx.stream(mx.cpu):  # a GPU may multiply float32 as TF32
        want, want_lse = run_mlx_rows(_widened(call))
        error, lse_error = _number(mx.linalg.norm(out - want) / mx.linalg.norm(want)), 0.0
        if call.want_lse:
            assert lse is not None
            assert want_lse is not None
            lse_error = _number(mx.abs(lse - want_lse).max())
    ran, dtype = launched or backend.executed(call.ticket), call.shape.dtype
    asked = plan.cut(call.shape.context)
    if ran is None or (ran.path, ran.partitions) != (asked.path, asked.partitions):
        return f"asked for {asked}, {ran} ran"
    if not (error <= _BOUND[dtype] and lse_error <= _LSE_BOUND):  # NaN fails, too
        return f"{plan} in {dtype} is wrong by {error:.1e}, LSE by {lse_error:.1e}"
    return None


def _number(array: mx.array) -> float:
    return float(array)


def _call(dtype: str, geometry: Geometry, layout: str, seed: int, lengths: tuple[int, ...]) -> Call:
    """A small call: 2 sequences, 20 heads, 2 query tokens. Pages serve more than once."""
    keys = iter(mx.random.split(mx.random.key(seed), 4))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(getattr(mx, dtype))

    rank, rope = geometry
    batch, ragged = len(lengths), len(set(lengths)) > 1
    starts = _STARTS if ragged and layout == "dense" else (0, 0)
    cache: Cache
    if layout == "paged":
        table = (mx.arange(batch * -(-max(lengths) // 16), dtype=mx.int32) % 38).reshape(batch, -1)
        cache = PagedCache(normal(38, 16, geometry.width), table, lengths)
    else:
        k_pe = normal(batch, 1, max(lengths), rope) if rope else None
        cache = DenseCache(normal(batch, 1, max(lengths), rank), k_pe, lengths, starts)
    contexts = tuple(n - start for n, start in zip(lengths, starts, strict=True))
    differ = contexts if ragged else ()
    shape = Shape(max(contexts), batch, _HEADS, dtype, geometry, _Q_LEN, layout, differ)
    q_nope = normal(batch, _HEADS, _Q_LEN, rank)
    q_pe = normal(batch, _HEADS, _Q_LEN, rope) if rope else None
    return Call(q_nope, q_pe, cache, 0.05, shape, lengths, starts, next_ticket(), False)


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
