"""The attention function that an engine's models share: its calls on a latent, by the plan.

A class that is not recognised hands its rope scores over as an additive mask. No kernel takes one,
but each takes rope keys. So a row's scores, one a token, become columns of the rope keys, and rope
queries that are zero elsewhere pick the row's own. A row, of any head and query token, is then a
head with one query, and the mask alone says what it sees.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from math import gcd
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..plan import MLX
from ..shapes import GEOMETRIES, MAX_BATCH, MAX_CONTEXT, MAX_Q_LEN, Geometry
from ..words import counted
from .bindings import Bindings
from .mla_classes import held_by
from .routing import Problem, Router, Step, decode
from .spans import CACHES, Span

NAME = "scaled_dot_product_attention"
PARAMETERS = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
ROUTED = "routed"
HOST_US = 30  # that a routed call takes of the host more than stock's (2 virtual cores, 2026-11-30)
_LOWEST = -1e30  # of a score: far below any other, and finite in float32 times all that follows
_SCALES = 2**-10, 2**4  # their inverses have a second part in float16, too
# The widest of a rank: it takes the most rows.
_GEOMETRY_OF = {each.kv_lora_rank: each for each in sorted(GEOMETRIES)}
_CACHES = {*CACHES, "CacheList"}  # plain ones: what they hand out is all that there is
_CACHE_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
_async_eval: Any = mx.async_eval  # MLX's stubs give it no types
_ours: dict[Any, Any] = {}  # by the function that ours passes calls on to


class FunctionRouter(Router):
    """Routes calls of attention classes, and those of the function that other classes share."""

    _latest: tuple[object, Step] | None = None

    def forget(self) -> None:
        super().forget()
        self._latest = None

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array,
        sinks: Any,
    ) -> mx.array | None:
        """The answer to a call whose keys are its values, `[batch, heads, q_len, rank]`; None, and
        a count, where the engine's own code is to run. Never raises.
        """
        step = self.found(lambda: self.function_step(queries, keys, cache, scale, mask, sinks))
        if step is None:
            return None
        out = self.attempt(step, lambda: by_rows(step, queries, keys, mask, scale))
        if step.plan == str(MLX):  # refused by the back end: MLX's own code takes less
            step.stock = f"the plan {step.decision.plan} can't run here"
        return out

    def function_step(
        self, queries: mx.array, keys: Any, cache: Any, scale: Any, mask: Any, sinks: Any
    ) -> Step | str:
        """How such a call is to run, or why not by a plan."""
        why = refusal(queries, keys, cache, scale, mask, sinks)
        if why:
            return why
        asked = queries.shape, keys.shape[2], queries.dtype
        latest = self._latest
        if latest is None or latest[0] != asked:
            latest = self._latest = asked, self._look_up_rows(*asked)
        step = latest[1]
        return step.stock or step

    def _look_up_rows(self, shape: tuple[int, ...], tokens: int, dtype: mx.Dtype) -> Step:
        """A step whose problem is one call of `by_rows`."""
        batch, heads, q_len, rank = shape
        geometry, total = _GEOMETRY_OF[rank], heads * q_len
        calls = calls_for(total, geometry)
        rows = total // calls
        step = self._look_up(Problem(Span((tokens,) * batch), 1, rows, dtype, geometry))
        plan, us, low = step.decision.plan, step.decision.expected_us, step.decision.speedup_low
        if step.stock:
            return step
        if not plan.native:
            step.stock = f"the plan is {plan} ({step.decision.source})"
        elif self.force:
            return step
        elif us is None or low is None:
            step.stock = f"a plan that was not measured ({step.decision.source})"
        elif not pays(us, low, calls, rows, geometry):
            step.stock = f"a plan that gains too little in {counted(calls, 'call')}"
        return step


def refusal(queries: mx.array, keys: Any, cache: Any, scale: Any, mask: Any, sinks: Any) -> str:
    """Why a call whose keys are its values is not ours; "" where it may be."""
    if sinks is not None:
        return "attention sinks"
    if cache is None:  # as in training: our kernels have no gradient
        return "no cache"
    if type(cache).__name__ not in _CACHES or type(cache).__module__ not in _CACHE_MODULES:
        return f"a cache of type {type(cache).__name__}"
    batch, heads, q_len, rank = queries.shape
    if not isinstance(keys, mx.array) or keys.shape != (batch, 1, keys.shape[2], rank):
        return "keys that are no latent"
    if q_len > MAX_Q_LEN:
        return "prefill"
    if rank not in _GEOMETRY_OF:
        return f"a latent of {rank} numbers"
    if _held_width(cache) != rank:  # a part of it may lie as Metal's kernels can't read it
        return "a latent that its cache does not hold as it is"
    if batch > MAX_BATCH or keys.shape[2] > MAX_CONTEXT:
        return "a batch or context beyond what kernels take"
    rows = heads, q_len, keys.shape[2]
    if not isinstance(mask, mx.array) or mask.shape not in ((batch, *rows), (1, *rows)):
        return "a mask without scores for each head"
    if not queries.dtype == keys.dtype == mask.dtype:
        return "arrays of several dtypes"
    if not isinstance(scale, float) or not _SCALES[0] <= scale <= _SCALES[1]:
        return "a scale that is unusual"
    return ""


def _held_width(cache: Any) -> int:
    """Numbers a token in a cache, or in the first of its parts; 0 where that is not to be seen."""
    parts = getattr(cache, "caches", (cache,))
    held = getattr(parts[0], "keys", None)
    return int(held.shape[-1]) if isinstance(held, mx.array) else 0


def calls_for(rows: int, geometry: Geometry) -> int:
    """The fewest calls of equal size for so many rows, each of which takes two rope columns."""
    most = geometry.rope_dim // 2
    return next(calls for calls in range(-(-rows // most), rows + 1) if rows % calls == 0)


def pays(us: float, low: float, calls: int, rows: int, geometry: Geometry) -> bool:
    """Whether `calls` calls of `rows` rows take less than MLX's own path, by all that is known.

    us, low: of one call, and how many times longer that path takes for its rows, at least; it takes
    no less for all rows. Beside our calls MLX's operations move, for each token, six numbers a row
    (its score is written, read and raised, read and transposed, read again), `rope_dim` to make
    the scores, since `low` counts these as the path's alone, and `rope_dim` written for each call.
    The path moves the token and each score twice at least. That a number takes as long in either
    is what this rests on. The host's time may be nobody's, or all of it be waited for.
    """
    rank, rope = geometry
    total, path_us = calls * rows, us * low
    beside = (6 * total + (1 + calls) * rope) / (rank + rope + 2 * total)
    return calls * us + beside * path_us + HOST_US < path_us


def by_rows(
    step: Step, queries: mx.array, latent: mx.array, scores: mx.array, scale: float
) -> mx.array:
    """Attention to a latent under additive scores, in calls of as many rows as the step's heads.

    queries: `[batch, heads, q_len, rank]`, as is what it returns. latent: `[batch, 1, tokens,
    rank]`. scores: `[batch or 1, heads, q_len, tokens]`, with the scale and all masks in them.
    """
    batch, heads, q_len, rank = queries.shape
    rows, rope_dim = step.problem.heads, step.problem.geometry.rope_dim
    calls, tokens = heads * q_len // rows, latent.shape[2]
    scores = mx.broadcast_to(scores, (batch, heads, q_len, tokens))
    k_pe = rope_keys(scores.reshape(batch, calls, rows, tokens), rope_dim)
    q_pe = rope_queries(batch, rows, rope_dim, scale, queries.dtype)
    q = queries.reshape(batch, heads * q_len, 1, rank)
    parts = zip(mx.split(q, calls, axis=1), mx.split(k_pe, calls, axis=1), strict=True)
    outs = [decode(step, rows_q, q_pe, latent, rows_k, scale) for rows_q, rows_k in parts]
    return mx.concatenate(outs, axis=1).reshape(queries.shape)


def rope_keys(scores: mx.array, rope_dim: int) -> mx.array:
    """Scores `[batch, calls, rows, tokens]` as rope keys `[batch, calls, tokens, rope_dim]`.

    Column c holds those of row c % rows. What masks is raised to a finite number: the zeros of
    other rows are multiplied by it. A token's columns begin at a step of 16 bytes, as the GPU
    kernels want them.
    """
    batch, calls, rows, tokens = scores.shape
    scores = mx.maximum(scores, max(_LOWEST, mx.finfo(scores.dtype).min))
    if scores.dtype == mx.float32:  # exact where it matters: near a row's largest, as near zero
        most = scores.max(-1, keepdims=True)
        scores = scores - mx.where(most > _LOWEST, most, 0)
    columns = mx.expand_dims(mx.contiguous(scores.swapaxes(2, 3)), 3)
    step = 8 // gcd(8, rows)
    copies = -(-rope_dim // (rows * step)) * step
    columns = mx.contiguous(mx.broadcast_to(columns, (batch, calls, tokens, copies, rows)))
    columns = columns.reshape(batch, calls, tokens, copies * rows)
    return columns if copies * rows == rope_dim else columns[..., :rope_dim]


@lru_cache(maxsize=16)
def rope_queries(batch: int, rows: int, rope_dim: int, scale: float, dtype: mx.Dtype) -> mx.array:
    """Rope queries `[batch, rows, 1, rope_dim]` that undo the scale of a row's own scores.

    1 / scale comes in two parts, for two columns with the same scores: in halves one alone would
    change them by as much as their own rounding did.
    """
    high = mx.array(1 / scale, dtype).item()
    own = {0: high, rows: 1 / scale - high}  # by a column's distance from the row's number
    picked = [[[own.get(column - row, 0.0) for column in range(rope_dim)]] for row in range(rows)]
    queries = mx.repeat(mx.array([picked], dtype), batch, axis=0)
    _async_eval(queries)  # a lazy array can be evaluated by the thread that made it alone
    return queries


# --- binding -------------------------------------------------------------------------------------


class _Thread(threading.local):
    decided = False


_thread = _Thread()


def decided(stock: Callable[..., Any], *call: Any) -> Any:
    """A recognised class's own code: its call is counted, and its attention not asked for again."""
    _thread.decided = True
    try:
        return stock(*call)
    finally:
        _thread.decided = False


def bind(bindings: Bindings, router: Callable[[], FunctionRouter | None]) -> dict[str, str]:
    """Bind ours to the shared functions, in each module of a model that is loaded and holds one.

    Of mlx-lm, and of mlx-vlm where that is loaded: nothing of it is imported. Modules that are
    loaded later take ours from the base. Returns `ROUTED` or why not, by function.
    """
    found = {f"base.{NAME}": _bind("mlx_lm", bindings, router)}
    if "mlx_vlm.models.base" in sys.modules:
        found[f"mlx_vlm.base.{NAME}"] = _bind("mlx_vlm", bindings, router)
    return found


def _bind(engine: str, bindings: Bindings, router: Callable[[], FunctionRouter | None]) -> str:
    found = held_by(f"{engine}.models.base", NAME)
    if isinstance(found, str):
        return found
    base = sys.modules[f"{engine}.models.base"]
    held = bindings.stock(base, NAME)  # ours already, where it is that of another engine
    stock = next((stock for stock, ours in _ours.items() if _reaches(held, ours)), held)
    if not _known(stock):
        return "its parameters are not the known ones"
    if stock not in _ours:
        _ours[stock] = _function(stock, router)
    for module in _models(engine):
        if vars(module).get(NAME) is stock:
            bindings.bind(module, NAME, _ours[stock])
    return ROUTED


def release() -> None:
    """Give modules that were loaded since, and took ours from the base, the stock function."""
    for engine in ("mlx_lm", "mlx_vlm"):
        for module in _models(engine):
            for stock, ours in _ours.items():
                if vars(module).get(NAME) is ours:
                    setattr(module, NAME, stock)


def _reaches(function: Any, ours: Any) -> bool:
    """Whether it is ours, or a wrapper that says it wraps ours."""
    while function is not ours and function is not None:
        function = getattr(function, "__wrapped__", None)
    return function is ours


def _models(engine: str) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(f"{engine}.models.") and isinstance(module, ModuleType)
    ]


def _known(function: Any) -> bool:
    """By its parameters, not by its source: that changes with what else it learns to do."""
    if not inspect.isfunction(function):
        return False
    found = inspect.signature(function, follow_wrapped=False).parameters
    kinds = {each.kind for each in found.values()}
    optional = [name for name, each in found.items() if each.default is not each.empty]
    either = {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return list(found) == PARAMETERS and kinds == either and optional == PARAMETERS[-1:]


def _function(
    stock: Callable[..., Any], router: Callable[[], FunctionRouter | None]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any, sinks: Any = None
    ) -> Any:
        if keys is values and not _thread.decided:  # the first is all that other models pay for
            routes = router()
            out = routes.attend(queries, keys, cache, scale, mask, sinks) if routes else None
            if out is not None:
                return out
        return stock(queries, keys, values, cache, scale, mask, sinks)

    return attention
