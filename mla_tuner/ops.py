"""The front door: check once, choose a plan, run it, and remember what ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import index
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, overload

import mlx.core as mx

from . import backends
from .backends import Backend, Call, next_ticket
from .caches import Cache, DenseCache, PagedCache
from .plan import MLX, Decision, Plan
from .shapes import (
    GEOMETRIES,
    MAX_BATCH,
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_Q_LEN,
    Geometry,
    Shape,
    effective_batch,
)

if TYPE_CHECKING:
    from .policy import Policy

_MAX_SCALE = 3.4028234663852886e38  # the largest float32
_DTYPE_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


@dataclass(frozen=True)
class Run:
    """The last call of this process.

    plan: what was asked for. decision: who asked, and why. executed: what the device really ran;
    None while the result is not evaluated, or once a later native call has overtaken it. detail:
    facts about that execution (isa, threads, tasks; kernel, blocks, pieces of the longest sequence:
    on CUDA those of a ragged batch may be fewer than the plan's, see piece_of in cuda_tiles).
    """

    plan: Plan
    decision: Decision
    executed: Plan | None
    detail: dict[str, object]


_last: tuple[Plan, Decision | None, Backend, int] | None = None  # no decision: the caller's plan


@overload
def mla_decode(
    q_nope: mx.array,
    q_pe: mx.array | None,
    cache: Cache,
    *,
    scale: float,
    plan: Plan | None = None,
    policy: Policy | None = None,
    return_lse: Literal[False] = False,
) -> mx.array: ...
@overload
def mla_decode(
    q_nope: mx.array,
    q_pe: mx.array | None,
    cache: Cache,
    *,
    scale: float,
    plan: Plan | None = None,
    policy: Policy | None = None,
    return_lse: Literal[True],
) -> tuple[mx.array, mx.array]: ...
def mla_decode(
    q_nope: mx.array,
    q_pe: mx.array | None,
    cache: Cache,
    *,
    scale: float,
    plan: Plan | None = None,
    policy: Policy | None = None,
    return_lse: bool = False,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention of 1..8 new tokens per sequence over a latent cache that already holds them.

    Query j of q_len sees the tokens [start, length - q_len + 1 + j). Lazy: evaluates nothing.
    Lengths are numbers of Python: what `mx.compile` made keeps those that it was traced with.

    q_nope: `[batch, heads, q_len, kv_lora_rank]`, float16, bfloat16 or float32; heads 1..128.
    q_pe: `[batch, heads, q_len, rope_dim]`, same dtype; None (or width 0) where rope_dim is 0.
    cache: `PagedCache` or `DenseCache` in the same dtype.
    scale: factor of the scores.
    plan: how to run; without it `policy`, or the process-wide policy, decides.
    return_lse: also return the natural log-sum-exp of the scores.

    Returns `[batch, heads, q_len, kv_lora_rank]` in q's dtype and, when asked, the LSE
    `[batch, heads, q_len]` in float32. A query that sees no token gives zeros and -inf.

    Raises:
        ValueError: an argument does not fit, or `plan` can't run here; nothing was run.
    """
    backend = _backend()
    checked = _check(q_nope, q_pe, cache, backend)
    try:
        scale = float(scale)
    except (TypeError, ValueError, OverflowError):
        _expected("scale as a number that float32 holds", scale)
    if not -_MAX_SCALE <= scale <= _MAX_SCALE:  # NaN fails, too
        _expected("scale as a number that float32 holds", scale)
    decision = None
    if plan is None:
        decision = _decide(checked, policy, backend, return_lse)
        plan = decision.plan
    else:
        _check_plan(plan, checked.shape, backend, return_lse)
    ticket = next_ticket()
    if not checked.shape.geometry[1]:
        q_pe = None
    shape, _, lengths, starts = checked
    # `_make` takes three quarters of the time of `Call(...)`.
    call = Call._make((q_nope, q_pe, cache, scale, shape, lengths, starts, ticket, return_lse))
    out, lse = backend.run(plan, call)
    global _last
    _last = plan, decision, backend, ticket
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def last_run() -> Run | None:
    """What the last `mla_decode` of this process was asked to do, and did; None before the first.

    The plain MLX paths are their graph, so they count as executed once built.
    """
    if _last is None:
        return None
    plan, decision, backend, ticket = _last
    if decision is None:
        decision = Decision(plan, "caller", "the caller gave this plan")
    executed = backend.executed(ticket) if plan.native else plan
    return Run(plan, decision, executed, backend.detail(ticket) if plan.native else {})


def _backend() -> Backend:
    """The back end of MLX's default device, which is where its arrays are evaluated."""
    return backends.get("cpu") if mx.default_device().type is mx.cpu else _gpu_backend()


@cache
def _gpu_backend() -> Backend:
    return backends.get("metal" if mx.metal.is_available() else "cuda")


def _check_plan(plan: Plan, shape: Shape, backend: Backend, want_lse: bool) -> None:
    if not isinstance(plan, Plan):
        _expected("plan as a Plan", type(plan).__name__)
    refusal = backend.refusal(plan, shape, want_lse)
    if refusal is not None:
        _expected("a plan that can run here", f"{plan}: {refusal}")


def _decide(checked: _Checked, policy: Policy | None, backend: Backend, want_lse: bool) -> Decision:
    shape = checked.shape
    if policy is None:
        policy = _policies().current()
    elif not hasattr(policy, "decide"):
        _expected("policy as a Policy", type(policy).__name__)
    decision = policy.decide(
        shape.context,
        checked.effective_batch,
        shape.heads,
        shape.dtype,
        shape.q_len,
        shape.geometry,
        shape.layout,
    )
    refusal = backend.refusal(decision.plan, shape, want_lse)
    return decision if refusal is None else _fallen_back(decision, refusal)


@cache
def _policies() -> ModuleType:
    """At the first decision, not at import: it brings sqlite3 and the device probe."""
    from . import policy

    return policy


@lru_cache(maxsize=256)
def _fallen_back(decision: Decision, refusal: str) -> Decision:
    reason = f"{decision.plan} can't run here ({refusal}); it was chosen because {decision.reason}"
    return Decision(MLX, decision.source, reason)


class _Checked(NamedTuple):
    """What the checks learnt: plain ints, whatever integer type the caller's were."""

    shape: Shape
    effective_batch: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


_passed: dict[tuple[object, ...], _Checked] = {}  # what the checks look at, and what they learnt
_MAX_PASSED = 1024  # lengths grow with every token: most entries serve the layers of one step


def _check(q_nope: mx.array, q_pe: mx.array | None, cache: Cache, backend: Backend) -> _Checked:
    """Checks every argument. The layers of a step pass equal shapes: all but the first look up."""
    beside: mx.array | None
    starts = None
    if isinstance(cache, PagedCache):
        beside = cache.block_tables
    elif isinstance(cache, DenseCache):
        beside = cache.k_pe
        if cache.starts is not None:
            starts = _entries("cache.starts", cache.starts)
    else:
        _expected("cache as a PagedCache or a DenseCache", type(cache).__name__)
    lengths = _entries("cache.lengths", cache.lengths)
    try:
        key = type(cache), backend.signature(q_nope, q_pe, cache.latent, beside), lengths, starts
    except TypeError:
        return _check_anew(q_nope, q_pe, cache, lengths, starts)  # it says which is no array
    checked = _passed.get(key)
    if checked is None:
        checked = _check_anew(q_nope, q_pe, cache, lengths, starts)
        if len(_passed) >= _MAX_PASSED:
            _passed.clear()
        _passed[key] = checked
    return checked


def _check_anew(
    q_nope: mx.array,
    q_pe: mx.array | None,
    cache: Cache,
    lengths: tuple[int, ...],
    starts: tuple[int, ...] | None,
) -> _Checked:
    query = _array("q_nope", q_nope)
    query_pe = None if q_pe is None else _array("q_pe", q_pe)
    latent = _array("cache.latent", cache.latent)
    if isinstance(cache, PagedCache):
        table = _array("cache.block_tables", cache.block_tables)
        return _check_paged(query, query_pe, latent, table, lengths)
    k_pe = None if cache.k_pe is None else _array("cache.k_pe", cache.k_pe)
    return _check_dense(query, query_pe, latent, k_pe, lengths, starts)


# Shape and dtype of an argument: all that the checks look at.
_Array = tuple[tuple[int, ...], mx.Dtype]


def _array(name: str, value: mx.array) -> _Array:
    if not isinstance(value, mx.array):
        _expected(f"{name} as an mx.array", type(value).__name__)
    return value.shape, value.dtype


def _entries(name: str, values: Sequence[int]) -> tuple[int, ...]:
    global _ints
    known = _ints
    if values is known:
        return known
    # An mx.array would have to be evaluated here, and serving must not wait.
    if isinstance(values, mx.array):
        _expected(f"{name} as host ints", "an mx.array")
    try:
        entries = tuple(values)  # the very same if it is one
        if _INT_ONLY.issuperset(map(type, entries)):
            _ints = entries
            return entries
        if mx.array in map(type, entries):
            raise TypeError  # index() would evaluate it
        return tuple(int(index(value)) for value in entries)
    except TypeError:
        _expected(f"{name} as a sequence of host ints", values)


_INT_ONLY = {int}
_ints: tuple[int, ...] = ()  # the last entries: the layers of a step pass the same tuple


def _check_paged(
    q_nope: _Array, q_pe: _Array | None, latent: _Array, table: _Array, lengths: tuple[int, ...]
) -> _Checked:
    batch, heads, q_len, dtype, geometry = _check_query(q_nope, q_pe)
    latent_shape = _shape_of("cache.latent", latent, dtype)
    if len(latent_shape) != 3 or latent_shape[2] != geometry.width:
        _expected(f"cache.latent [blocks, block_size, {geometry.width}]", list(latent_shape))
    blocks, block_size, _ = latent_shape
    if not blocks or not block_size or block_size % 8:
        _expected("cache.latent of blocks of a multiple of 8 tokens", list(latent_shape))
    table_shape = _shape_of("cache.block_tables", table, mx.int32)
    if len(table_shape) != 2 or table_shape[0] != batch:
        _expected(f"cache.block_tables [{batch}, max_blocks]", list(table_shape))
    _counts("cache.lengths", lengths, batch)
    columns = -(-max(lengths) // block_size)
    if columns > table_shape[1]:
        _expected(
            f"cache.block_tables with {columns} or more columns for length {max(lengths)} "
            f"in blocks of {block_size}",
            list(table_shape),
        )
    starts = (0,) * batch
    shape = Shape(max(lengths), batch, heads, _DTYPE_NAMES[dtype], geometry, q_len, "paged")
    return _checked(shape, lengths, starts)


def _check_dense(
    q_nope: _Array,
    q_pe: _Array | None,
    latent: _Array,
    k_pe: _Array | None,
    lengths: tuple[int, ...],
    starts: tuple[int, ...] | None,
) -> _Checked:
    batch, heads, q_len, dtype, geometry = _check_query(q_nope, q_pe)
    rank, rope = geometry
    latent_shape = _shape_of("cache.latent", latent, dtype)
    tokens = latent_shape[2] if len(latent_shape) == 4 else 0
    if latent_shape != (batch, 1, tokens, rank):
        _expected(f"cache.latent [{batch}, 1, tokens, {rank}]", list(latent_shape))
    if k_pe is not None:
        k_pe_shape = _shape_of("cache.k_pe", k_pe, dtype)
        if k_pe_shape != (batch, 1, tokens, rope):
            _expected(f"cache.k_pe {[batch, 1, tokens, rope]}", list(k_pe_shape))
    elif rope:
        _expected(f"cache.k_pe {[batch, 1, tokens, rope]}", None)
    _counts("cache.lengths", lengths, batch)
    if max(lengths) > tokens:
        _expected(f"cache.lengths up to the buffer's {tokens} tokens", list(lengths))
    starts = (0,) * batch if starts is None else starts
    _counts("cache.starts", starts, batch)
    if any(start > length for start, length in zip(starts, lengths, strict=True)):
        _expected(f"cache.starts up to the lengths {list(lengths)}", list(starts))
    context = max(length - start for start, length in zip(starts, lengths, strict=True))
    shape = Shape(context, batch, heads, _DTYPE_NAMES[dtype], geometry, q_len, "dense")
    return _checked(shape, lengths, starts)


def _check_query(q_nope: _Array, q_pe: _Array | None) -> tuple[int, int, int, mx.Dtype, Geometry]:
    """Checks the queries; returns batch, heads, q_len, dtype and the geometry of their widths."""
    shape, dtype = q_nope
    if dtype not in _DTYPE_NAMES:
        _expected(f"q_nope in {', '.join(_DTYPE_NAMES.values())}", dtype)
    if len(shape) != 4:
        _expected("q_nope [batch, heads, q_len, kv_lora_rank]", list(shape))
    batch, heads, q_len, rank = shape
    for part, value, most in (
        ("batch", batch, MAX_BATCH),
        ("heads", heads, MAX_HEADS),
        ("q_len", q_len, MAX_Q_LEN),
    ):
        if not 1 <= value <= most:
            _expected(f"q_nope of {part} 1..{most}", list(shape))
    rope = 0
    if q_pe is not None:
        pe_shape = _shape_of("q_pe", q_pe, dtype)
        if len(pe_shape) != 4 or pe_shape[:3] != (batch, heads, q_len):
            _expected(f"q_pe [{batch}, {heads}, {q_len}, rope_dim]", list(pe_shape))
        rope = pe_shape[3]
    geometry = Geometry(rank, rope)
    if geometry not in GEOMETRIES:
        known = ", ".join(map(str, GEOMETRIES))
        _expected(f"q_nope and q_pe of widths {known}", geometry)
    return batch, heads, q_len, dtype, geometry


def _shape_of(name: str, array: _Array, dtype: mx.Dtype) -> tuple[int, ...]:
    if array[1] != dtype:
        _expected(f"{name} in {dtype}", array[1])
    return array[0]


def _counts(name: str, values: tuple[int, ...], batch: int) -> None:
    if len(values) != batch:
        _expected(f"{name} with {batch} entries, one per sequence", list(values))
    if min(values) < 0 or max(values) > MAX_CONTEXT:
        _expected(f"{name} in 0..{MAX_CONTEXT}", list(values))


def _checked(shape: Shape, lengths: tuple[int, ...], starts: tuple[int, ...]) -> _Checked:
    contexts = tuple(length - start for start, length in zip(starts, lengths, strict=True))
    if len(set(contexts)) > 1:
        shape = replace(shape, lengths=contexts)
    return _Checked(shape, effective_batch(contexts), lengths, starts)


def _expected(what: str, got: object) -> NoReturn:
    try:
        text = str(got)
    except ValueError:  # Python writes no int of more than 4300 digits
        text = f"{type(got).__name__} of thousands of digits"
    raise ValueError(f"[mla_decode] expected {what}; got {text}") from None
