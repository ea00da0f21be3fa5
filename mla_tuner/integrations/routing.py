"""From one attention call of an engine to a plan, or to the reason why its own code runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from ..caches import DenseCache
from ..ops import last_run, mla_decode
from ..plan import MLX, Decision, Plan
from ..shapes import GEOMETRIES, MAX_HEADS, MAX_Q_LEN, Geometry, effective_batch
from .counts import Stats
from .mla_classes import MlaClass, forward
from .spans import SeenMask, Span, span_of

if TYPE_CHECKING:
    from ..policy import Policy

log = logging.getLogger("mla_tuner")
_DTYPES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


class Problem(NamedTuple):
    """What the layers of a step have in common."""

    span: Span
    q_len: int
    heads: int
    dtype: mx.Dtype
    geometry: Geometry


class Step:
    """A step's decision, in the place of the policy that made it: looked up once for all layers.

    `plan` is what the first layer ran, once it did; `stock` why the engine's own code is to run.
    """

    def __init__(self, problem: Problem, decision: Decision, stock: str) -> None:
        self.problem = problem
        self.decision = decision
        self.stock = stock
        self.plan = ""

    def decide(self, *shape: object) -> Decision:
        return self.decision


class Router:
    """Routes calls by `policy`, or by the policy of this process, which is loaded when needed."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.stats = Stats()
        self.seen: SeenMask | None = None
        self._step: Step | None = None
        self._failed: set[Plan] = set()

    def step(self, kind: MlaClass, module: Any, x: mx.array, mask: Any, cache: Any) -> Step | None:
        """How a call is to run; None, and a count, where the engine's own code is to. Never raises.

        Nothing is written yet: a cache takes the tokens of a call only once.
        """
        try:
            step = self._step_or_reason(kind, module, x, mask, cache)
        except Exception as error:  # an engine's release that we don't know
            # Its type alone: a text with numbers in it would be a new reason every time.
            self.stats.count_stock(f"{type(error).__name__} in routing", str(error))
            return None
        if isinstance(step, Step):
            return step
        self.stats.count_stock(step)
        return None

    def run(
        self,
        step: Step,
        kind: MlaClass,
        module: Any,
        x: mx.array,
        query_scale: mx.array | None,
        mask: Any,
        cache: Any,
    ) -> Any:
        """The attention module's answer, `[batch, q_len, hidden]`."""

        def attend(q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
            out = self._routed(step, q, q_pe, latent, k_pe, module.scale)
            return plain(q, q_pe, latent, k_pe, module.scale, mask) if out is None else out

        return forward(kind, module, x, query_scale, cache, attend)

    def _step_or_reason(
        self, kind: MlaClass, module: Any, x: mx.array, mask: Any, cache: Any
    ) -> Step | str:
        batch, q_len, _ = x.shape
        if q_len > MAX_Q_LEN:
            return "prefill"
        if module.training:
            return "training mode"
        span = self._span(kind, module, mask, cache, batch, q_len)
        if isinstance(span, str):
            return span
        geometry = Geometry(module.kv_lora_rank, module.qk_rope_head_dim)
        problem = Problem(span, q_len, getattr(module, kind.heads), x.dtype, geometry)
        step = self._step
        if step is None or step.problem != problem:
            step = self._step = self._look_up(problem)
        return step.stock or step

    def _span(
        self, kind: MlaClass, module: Any, mask: Any, cache: Any, batch: int, q_len: int
    ) -> Span | str:
        if not kind.indexed or cache is None:
            return span_of(cache, mask, batch, q_len, self.seen)
        span, index = (span_of(each, mask, batch, q_len, self.seen) for each in cache)
        if isinstance(span, str):
            return span
        if span != index:
            return "an index of other tokens than the cache"
        if span.lengths[0] > module.indexer.index_topk:
            return "more tokens than the indexer keeps"
        return span

    def _look_up(self, problem: Problem) -> Step:
        (lengths, starts), q_len, heads, dtype, geometry = problem
        if dtype not in _DTYPES:
            return Step(problem, Decision(MLX, "gates", ""), f"dtype {dtype}")
        if geometry not in GEOMETRIES or heads > MAX_HEADS:
            return Step(problem, Decision(MLX, "gates", ""), f"{heads} heads of width {geometry}")
        if self.policy is None:
            from .. import policy  # not at import: it brings sqlite3 and the device probe

            self.policy = policy.current()
        padding = starts or (0,) * len(lengths)
        contexts = [end - start for start, end in zip(padding, lengths, strict=True)]
        decision = self.policy.decide(
            max(contexts),
            effective_batch(contexts),
            heads,
            _DTYPES[dtype],
            q_len,
            geometry,
            "dense",
        )
        self.stats.look_ups += 1
        stock = ""
        if decision.plan == MLX:
            stock = f"the plan is mlx ({decision.source})"
        elif decision.plan in self._failed:
            stock = f"the plan {decision.plan} failed before"
        return Step(problem, decision, stock)

    def _routed(
        self,
        step: Step,
        q: mx.array,
        q_pe: mx.array,
        latent: mx.array,
        k_pe: mx.array,
        scale: float,
    ) -> mx.array | None:
        """The plan's answer; None, and a count, where it has none."""
        (lengths, starts) = step.problem.span
        if latent.shape[2] != lengths[0] or not q.dtype == latent.dtype == k_pe.dtype:
            self.stats.count_stock("a cache that holds other tokens or another dtype")
            return None
        try:
            policy = cast("Policy", step)  # all that the operation asks of one
            cache = DenseCache(latent, k_pe, lengths, starts)
            out = mla_decode(q, q_pe, cache, scale=scale, policy=policy)
        except Exception as error:  # no request is lost for a plan
            self._failed.add(step.decision.plan)
            self._step = None
            log.warning("plan %s is not used again: %s", step.decision.plan, error)
            self.stats.count_stock(f"the plan {step.decision.plan} failed")
            return None
        if not step.plan:  # the back end may have refused what was decided
            run = last_run()
            step.plan = str(run.plan if run else step.decision.plan)
        self.stats.count_routed(step.plan)
        return out


def plain(
    q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, scale: float, mask: Any
) -> mx.array:
    """The same attention in MLX's own operations, under a mask of any kind."""
    scores = (q_pe * scale) @ k_pe.swapaxes(-1, -2)
    if isinstance(mask, str):
        tokens, q_len = latent.shape[2], q.shape[2]
        mask = mx.arange(tokens) <= mx.arange(tokens - q_len, tokens)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(q, latent, latent, scale=scale, mask=scores)
