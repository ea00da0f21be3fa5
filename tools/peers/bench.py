"""Times the plans of a shape, then the best one beside the other libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Timer
from time import perf_counter

from mla_tuner.cases import TOLERANCE
from mla_tuner.shapes import Shape

from .caches import Caches
from .choices import caches_of, short
from .graphs import Graph, interleaved
from .ours import Bound, Kernels, Planned
from .tables import DECODE, MERGE, Row, part, times_line, trial_lines
from .theirs import Maker

PEER_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # they round weights to the dtype
TRIAL_WARM_MS, TRIAL_REPLAYS = 8.0, 7  # of a plan in the sweep
LONGEST_WORDS = 500  # letters of what went wrong
FIRST_WARM_MS = 100.0  # of a shape's first: the GPU was idle, and its clock low
HANGS_S = 60.0  # after which a call that hasn't ended never will
FINALISTS = 3  # plans of a sweep that are timed once more, as long as any

Trial = tuple[Bound, Graph]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int  # 90 for sm_90
    cores: int
    l2_bytes: int

    @property
    def architecture(self) -> str:
        """What MLX compiles for."""
        return f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"


@dataclass
class Bench:
    """What all shapes share."""

    gpu: Gpu
    kernels: Kernels
    makers: dict[str, Maker]
    rounds: int
    caches: int

    def fill(self, row: Row, shape: Shape, work: list[Planned]) -> None:
        """Times all plans, then the best one of each variant and the others in rounds.

        Raises:
            GpuLostError: a kernel broke something; the row has what was there before.
        """
        started = perf_counter()
        caches = Caches(shape, caches_of(shape, self.gpu.l2_bytes, self.caches))
        row.caches = caches.count
        winners = self._trials(row, work, caches)
        for line in trial_lines(row) if len(work) > len(winners) else ():
            say(line)
        graphs = _graphs(row, winners, caches) | self._peers(row, caches)
        row.times = interleaved(graphs, self.rounds)
        for fault in row.faults:
            say(f"{row.label} {fault}")
        seconds = perf_counter() - started
        say(f"{row.label}: {times_line(row)}; {row.caches} caches, {seconds:.1f} s")

    def _trials(self, row: Row, work: list[Planned], caches: Caches) -> dict[str, Trial]:
        """The best plan of each variant; plans in order, so that variants alternate."""
        tried: dict[str, dict[str, Trial]] = {}
        for each in sorted(work, key=lambda each: (each.plan.tile, each.plan.partitions)):
            name, plan = each.variant.name, short(each.plan)
            failure = self.kernels.failure(each)
            if failure:
                row.faults.append(f"{name} {plan} does not compile: {failure[:LONGEST_WORDS]}")
                continue
            try:
                with watched(f"{row.label} {name} {plan}"):
                    bound = Bound(each, self.kernels, caches)
                    graph = Graph(bound.call, caches.count)
                    right = self._check(row, f"{name} {plan}", graph, bound, caches)
            except Exception as error:
                _failed(row, f"{name} {plan}", error)
                continue
            if not right:
                continue
            warm_ms = TRIAL_WARM_MS if tried else FIRST_WARM_MS
            row.trials.setdefault(name, {})[plan] = graph.us(warm_ms, TRIAL_REPLAYS)
            tried.setdefault(name, {})[plan] = bound, graph
        return {name: _best(row.trials[name], found) for name, found in tried.items()}

    def _peers(self, row: Row, caches: Caches) -> dict[str, Graph]:
        found = {}
        for name, maker in self.makers.items():
            try:
                with watched(f"{row.label} {name}"):
                    graph = Graph(maker(caches), caches.count)
                    right = self._check(row, name, graph, None, caches)
                if right:
                    found[name] = graph
            except Exception as error:
                _failed(row, name, error, fault=False)
        return found

    def _check(
        self, row: Row, name: str, graph: Graph, bound: Bound | None, caches: Caches
    ) -> bool:
        """Notes the error of what a replay answers, and a fault if it is too large; if it isn't."""
        if bound is not None:
            bound.spoil()
        else:
            graph.last.fill_(float("nan"))
        graph.replay()
        error = row.errors[name] = caches.error(graph.last)
        limit = (PEER_TOLERANCE if bound is None else TOLERANCE)[caches.shape.dtype]
        right = error <= limit  # a NaN isn't
        if not right:
            row.faults.append(f"{name} is WRONG: error {error:.2e}, limit {limit:.1e}")
        return right


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Ends the process if this takes so long that a kernel must hang."""

    def give_up() -> None:
        say(f"{what} hangs; giving up")
        os._exit(1)  # no exception reaches a thread that waits for the GPU

    timer = Timer(HANGS_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class GpuLostError(Exception):
    """A kernel broke the device's context: nothing can run in this process any more."""


def _graphs(row: Row, winners: dict[str, Trial], caches: Caches) -> dict[str, Graph]:
    """Of whole calls, and of each launch alone."""
    found = {}
    for name, (bound, graph) in winners.items():
        row.plans[name] = short(bound.work.plan)
        found[name] = graph
        found[part(name, DECODE)] = Graph(bound.decode, caches.count)
        if bound.merges:
            found[part(name, MERGE)] = Graph(bound.merge, caches.count)
    return found


def _best(trials: dict[str, float], tried: dict[str, Trial]) -> Trial:
    """The fastest plan; the first few are timed once more, for a sweep is short."""
    first = sorted(trials, key=lambda plan: trials[plan])[:FINALISTS]
    if len(first) > 1:
        trials |= {plan: tried[plan][1].us() for plan in first}
    return tried[min(first, key=lambda plan: trials[plan])]


def _failed(row: Row, name: str, error: Exception, fault: bool = True) -> None:
    """Notes what couldn't run. Raises GpuLostError if nothing can any more."""
    reason = (
        f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:LONGEST_WORDS]}"
    )
    try:
        import_module("torch").cuda.synchronize()
    except Exception as lost:
        raise GpuLostError(f"{row.label} {reason}") from lost
    if fault:
        row.faults.append(reason)
    else:
        say(f"{row.label} {reason}")
