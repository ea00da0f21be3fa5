"""Runs whole attention modules where `live` runs single calls: same clock, chains and processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any

import mlx.core as mx

from . import cases, ops
from .caches import Cache, DenseCache, PagedCache
from .device import Device
from .live import COLD_CACHES, LiveRunner, LiveRunners, RemoteRunner, _Host
from .measure import MAX_INNER, Checked, Runner
from .plan import Plan
from .shapes import DTYPE_BYTES, Shape
from .worker import Worker
from .wrapper_bench_module import (
    Inputs,
    Module,
    Weights,
    copied,
    make_state,
    make_weights,
    state_bytes,
    weight_numbers,
)
from .wrapper_bench_widths import Widths

CHECKED_TOKENS = 1 << 16  # of the sequences that are held to float64: more would take seconds


class Turn:
    """A module and its input: what a chain is made of in the place of a `Case`."""

    def __init__(self, module: Module, x: mx.array) -> None:
        self.module = module
        self.q_nope = x  # what a chain begins with, by the name that `LiveRunner` knows


class ModuleRunners(LiveRunners):
    """Makes runners of modules, and keeps the weights of the last. widths: by heads."""

    def __init__(self, device: Device, widths: Mapping[int, Widths]) -> None:
        super().__init__(device)
        self.widths = widths
        self._weights: list[Weights] = []
        self._sized: object = None

    def __call__(self, shape: Shape, seed: int) -> LiveRunner:
        if self.clock:
            mx.clear_cache()  # as `LiveRunners` does
        return ModuleRunner(shape, self, seed)

    def weights(self, shape: Shape, layer: int) -> Weights:
        """Those of a layer; layers follow one another until their weights are cold.

        Raises:
            MemoryError: see `copies`.
        """
        sized = shape.heads, shape.geometry, shape.dtype
        if sized != self._sized:
            self._weights.clear()
        nbytes = weight_numbers(self.widths[shape.heads], shape) * DTYPE_BYTES[shape.dtype]
        layer %= self.copies(nbytes)  # refuses what would not fit
        if not self._weights:
            self._weights, self._sized = [make_weights(self.widths[shape.heads], shape)], sized
        while len(self._weights) <= layer:
            self._weights.append(copied(self._weights[0]))
        return self._weights[layer]

    def copies(self, nbytes: int) -> int:
        """How many of that size it takes until the first one is cold, at most a model's layers.

        Raises:
            MemoryError: one alone is larger than `most_bytes`.
        """
        self.refuse_beyond("a layer", nbytes)
        cold = ceil(COLD_CACHES * self.device.cache_bytes / nbytes) + 1
        return max(1, min(cold, MAX_INNER, self.most_bytes // nbytes))


class ModuleRunner(LiveRunner):
    """A `LiveRunner` whose calls are steps of whole modules, each with a cache of its own."""

    def __init__(self, shape: Shape, runners: ModuleRunners, seed: int = 0) -> None:
        super().__init__(shape, runners, seed)
        self._modules = runners
        self._turns: list[Turn] = []
        self._apart: Any = None  # for the checks: what the host reads is never timed

    def _check(self, plan: Plan) -> Checked:
        """The attention of some sequences against float64, on what the projections made."""
        copies = self._modules.copies(state_bytes(self.shape))  # refuses what would not fit
        turn: Any = self._apart or self._made(copies)
        self._apart = turn
        start = self.now()
        module, found = turn.module, turn.module.inputs(turn.q_nope)
        out = ops.mla_decode(*found, scale=module.scale, plan=plan)
        answer = module.output(out)
        mx.eval(out, answer, *_arrays(found))
        first_s = self.now() - start
        checked = cases.check(*last_sequences(module, found, out), None, plan, rows=self._rows())
        reason = checked.reason
        if checked.ok and not mx.isfinite(answer).all().item():
            reason = "the module's output is not finite"
        warm_s = first_s if reason else self._warm(self._next(), plan, first_s)
        return Checked(not reason, checked.max_error, reason, warm_s)

    def _call(
        self, case: Any, query: mx.array, plan: Plan, return_lse: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """A step of the turn's module; its answer is the next one's input."""
        turn: Turn = case
        return turn.module(query, plan), None

    def _next(self) -> Any:
        """The next turn of the ring, so that its cache and weights have long been evicted."""
        if self._at == len(self._turns):
            self._turns.append(self._made(self._at))
        turn = self._turns[self._at]
        self._at = (self._at + 1) % self._modules.copies(state_bytes(self.shape))
        return turn

    def _made(self, layer: int) -> Turn:
        shape, widths = self.shape, self._modules.widths[self.shape.heads]
        state = make_state(shape, seed=layer)
        module = Module(widths, shape, self._modules.weights(shape, layer), state)
        dims = shape.batch, shape.q_len, widths.hidden_size
        x = mx.random.normal(dims, getattr(mx, shape.dtype), key=mx.random.key(layer))
        mx.eval(x)
        return Turn(module, x)


def last_sequences(module: Module, found: Inputs, out: mx.array) -> tuple[cases.Case, mx.array]:
    """The end of the batch as a case with its answer: as many sequences as are checked quickly."""
    shape = module.shape
    count = max(1, min(shape.batch, CHECKED_TOKENS // max(1, shape.context)))
    some, lengths = slice(shape.batch - count, None), shape.all_lengths[:count]
    cache: Cache = found.cache
    if isinstance(cache, PagedCache):
        cache = PagedCache(cache.latent, cache.block_tables[some], lengths)
    else:
        k_pe = None if cache.k_pe is None else cache.k_pe[some]
        cache = DenseCache(cache.latent[some], k_pe, lengths)
    fewer = Shape(
        *(shape.context, count, shape.heads, shape.dtype),
        *(shape.geometry, shape.q_len, shape.layout),
    )
    q_pe = None if found.q_pe is None else found.q_pe[some]
    case = cases.Case(fewer, found.q_nope[some], q_pe, cache, module.scale)
    some_out = out[some]
    mx.eval(some_out, *_arrays(Inputs(case.q_nope, case.q_pe, case.cache)))
    return case, some_out


def _arrays(inputs: Inputs) -> list[mx.array]:
    cache = inputs.cache
    beside = cache.block_tables if isinstance(cache, PagedCache) else cache.k_pe
    found = (inputs.q_nope, inputs.q_pe, cache.latent, beside)
    return [each for each in found if each is not None]


class _ModuleHost(_Host):
    """The other end, for modules."""

    def __init__(self, device: Device, widths: Mapping[int, Widths]) -> None:
        self._runners = ModuleRunners(device, widths)
        self._what, self._runner = None, None


class IsolatedModules:
    """Makes runners of modules, in a process beside this one: a crash there is a row here."""

    def __init__(self, device: Device, widths: Mapping[int, Widths]) -> None:
        self._worker = Worker("the process of the benchmark", _ModuleHost, device, widths)
        self._gpu_time: bool | None = None

    def __enter__(self) -> IsolatedModules:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()

    def __call__(self, shape: Shape, seed: int) -> Runner:
        return RemoteRunner(self._worker, shape, seed, self.queued)

    def queued(self) -> bool:
        """Whether GPU time is measured."""
        if self._gpu_time is None:
            self._gpu_time = False
            with suppress(Exception):  # the first check will tell what is wrong
                self._gpu_time = bool(self._worker.call("queued"))
        return self._gpu_time
