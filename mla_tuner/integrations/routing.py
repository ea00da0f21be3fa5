"""From one attention call of an engine to a plan, or to the reason why its own code runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from ..caches import DenseCache
from ..ops import last_run, mla_decode
from ..plan import MLX, Decision, Plan
from ..shapes import GEOMETRIES, MAX_HEADS, MAX_Q_LEN, Geometry, effective_batch
from ..words import counted
from .counts import Stats
from .mla_classes import MlaClass, forward, plain
from .spans import SeenMask, Span, span_of
from .switch import Forced

if TYPE_CHECKING:
    from ..policy import Policy

log = logging.getLogger("mla_tuner")
_SECTIONS = 8  # of the rank, whose products are added up apart
_TRACING = "function transformations"  # in MLX's words, where a graph is only recorded
FAILED: set[Plan] = set()  # plans that raised in this process, whoever ran them
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

    `plan` is what the first layer ran, once it did; `stock` why the engine's own code is to run,
    from the start or since the plan failed.
    """

    def __init__(self, problem: Problem, decision: Decision, stock: str) -> None:
        self.problem = problem
        self.decision = decision
        self.stock = stock
        self.plan = ""

    def decide(self, *shape: object) -> Decision:
        return self.decision


class Router:
    """Routes calls by `policy`, or by the policy of this process, which is loaded when needed.

    force: by our kernels wherever they can run, see `switch.Forced`. failed: plans that are not
    used, to which those are added that raise; by default those of this router alone.
    """

    layout = "dense"  # of the engine's caches

    def __init__(
        self,
        policy: Policy | None = None,
        force: bool = False,
        failed: set[Plan] | None = None,
    ) -> None:
        self.force = force
        self.stats = Stats()
        self._given = policy
        self.seen: SeenMask | None = None
        self._step: Step | None = None
        self._failed = set() if failed is None else failed
        self._ran: set[tuple[object, ...]] = set()  # plans and kinds of calls that gave an answer

    def step(self, kind: MlaClass, module: Any, x: mx.array, mask: Any, cache: Any) -> Step | None:
        """How a call is to run; None, and a count, where the engine's own code is to. Never raises.

        Nothing is written yet: a cache takes the tokens of a call only once.
        """
        return self.found(lambda: self._step_or_reason(kind, module, x, mask, cache))

    def found(self, look: Callable[[], Step | str]) -> Step | None:
        """What `look` finds; None, and a count, where that is a reason or an error."""
        try:
            step = look()
        except Exception as error:  # an engine's release that we don't know
            # Its type alone: a text with numbers in it would be a new reason every time.
            self.stats.count_stock(f"{type(error).__name__} in routing", str(error))
            return None
        if isinstance(step, Step):
            return step
        self.stats.count_stock(step)
        return None

    def attempt(self, step: Step, run: Callable[[], mx.array]) -> mx.array | None:
        """The answer of `run`, which follows the step's plan; None, and a count, if it raises.

        MLX is lazy: a kernel that does not compile raises where an answer is asked for. So the
        first answer of a plan to a kind of call is asked for here, where stock can still be run.
        """
        plan = step.decision.plan
        try:
            out = run()
            if not step.plan:
                self._try_out(plan, step.problem, out)
        except Exception as error:  # no request is lost for a plan
            self._failed.add(plan)
            self.forget()
            step.stock = f"the plan {plan} failed before"
            log.warning("plan %s is not used again: %s", plan, error)
            self.stats.count_stock(f"the plan {plan} failed")
            return None
        if not step.plan:  # the back end may have refused what was decided
            ran = last_run()
            step.plan = str(ran.plan if ran else plan)
        self.stats.count_routed(step.plan)
        return out

    def _try_out(self, plan: Plan, problem: Problem, out: mx.array) -> None:
        """Evaluates the plan's first answer to such a call; raises what that raises."""
        kind = plan, *problem[1:]
        if kind not in self._ran and _evaluated(out):
            self._ran.add(kind)

    def forget(self) -> None:
        """What was decided: it may be by the plan that failed."""
        self._step = None

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

        def attend(q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array) -> Any:
            q, scale = module.embed_q(q_nope), getattr(module, kind.scale)
            out = self._routed(step, q, q_pe, latent, k_pe, scale)
            if out is None:
                out = plain(q, q_pe, latent, k_pe, scale, mask)
            # Stock expands the latents, and takes the average over tokens after that.
            expands = kind.absorbed or out.shape[2] > 1
            if expands and out.dtype == mx.float32:
                return _in_sections(module.unembed_out, out)
            return module.unembed_out(out)

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

    @cached_property
    def _policy(self) -> Policy:
        from .. import policy  # not at import: it brings sqlite3 and the device probe

        decides = policy.current() if self._given is None else self._given  # one may have no rows
        return cast("Policy", Forced(decides)) if self.force else decides

    def _look_up(self, problem: Problem) -> Step:
        (lengths, starts, window), q_len, heads, dtype, geometry = problem
        if dtype not in _DTYPES:
            return Step(problem, Decision(MLX, "gates", ""), f"dtype {dtype}")
        if geometry not in GEOMETRIES or heads > MAX_HEADS:
            why = f"{counted(heads, 'head')} of width {geometry}"
            return Step(problem, Decision(MLX, "gates", ""), why)
        if window is not None:  # a call for each query
            q_len, (lengths, starts, _) = 1, problem.span.queries(q_len)[-1]
        padding = starts or (0,) * len(lengths)
        contexts = [end - start for start, end in zip(padding, lengths, strict=True)]
        batch = effective_batch(contexts)
        asked = (max(contexts), batch, heads, _DTYPES[dtype], q_len, geometry, self.layout)
        decision = self._policy.decide(*asked)
        self.stats.count_look_up(decision, *asked)
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
        span = step.problem.span
        if latent.shape[2] != span.lengths[0] or not q.dtype == latent.dtype == k_pe.dtype:
            self.stats.count_stock("a cache that holds other tokens or another dtype")
            return None
        return self.attempt(step, lambda: decode(step, q, q_pe, latent, k_pe, scale))


def _in_sections(projection: Any, out: mx.array) -> Any:
    """`projection` of `[batch, heads, q_len, kv_lora_rank]`, summed over sections of the rank.

    It has 0.4 of the error: a product on the CPU is one chain of additions. With four tokens or
    more it takes no longer, with one twice as long.
    """
    plain = isinstance(projection, dict) and [*projection] == ["weight"]  # not quantised
    if not plain or projection["weight"].shape[-1] != out.shape[-1]:
        return projection(out)
    sections = (mx.split(each, _SECTIONS, axis=-1) for each in (out, projection["weight"]))
    return reduce(add, (o @ w.swapaxes(-1, -2) for o, w in zip(*sections, strict=True)))


def _evaluated(out: mx.array) -> bool:
    """Evaluates it; False where a graph is only recorded, as by `mx.compile`."""
    try:
        mx.eval(out)
    except (RuntimeError, ValueError) as error:
        if _TRACING in str(error):
            return False
        raise
    return True


def decode(
    step: Step, q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, scale: float
) -> mx.array:
    """`mla_decode` by the step's plan; for each query by itself where a window cuts them."""
    policy = cast("Policy", step)  # all that the operation asks of one

    def run(q: mx.array, q_pe: mx.array, span: Span) -> mx.array:
        cache = DenseCache(latent, k_pe, span.lengths, span.starts)
        return mla_decode(q, q_pe, cache, scale=scale, policy=policy)

    span, q_len = step.problem.span, step.problem.q_len
    if span.window is None:
        return run(q, q_pe, span)
    each = enumerate(span.queries(q_len))
    outs = [run(q[:, :, at : at + 1], q_pe[:, :, at : at + 1], one) for at, one in each]
    return mx.concatenate(outs, axis=2)
