"""Microseconds of a call by CUDA graphs: one graph holds a call on each of the caches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

WARM_MS = 25  # by the kernels themselves: matrix products would lower the clock
REPLAYS = 15


@dataclass(frozen=True)
class Time:
    """Median over rounds, and the lowest and highest of them, in microseconds a call."""

    us: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, rounds: list[float]) -> Time:
        return cls(median(rounds), min(rounds), max(rounds), len(rounds))


class Graph:
    """Calls `call(0)` to `call(count - 1)`, captured; `last` is what the last one returned."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        """Runs the calls once before, for what a first call does: compiling, sizes of buffers."""
        self._torch = torch = import_module("torch")
        self._count, self._call = count, call  # whatever it holds, the graph goes on using
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for k in range(count):
                call(k)
            self._stream.synchronize()
            self._graph.capture_begin(capture_error_mode="relaxed")
            try:
                for k in range(count):
                    self.last = call(k)
            except BaseException:
                with suppress(RuntimeError):  # a stream must not go on capturing
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        """Runs it once, after all that was started before, and waits."""
        self._torch.cuda.synchronize()
        with self._torch.cuda.stream(self._stream):
            self._graph.replay()
            self._stream.synchronize()

    def us(self, warm_ms: float = WARM_MS, replays: int = REPLAYS) -> float:
        """Median over replays of microseconds a call."""
        torch, samples = self._torch, list[float]()
        until = time.perf_counter() + warm_ms / 1e3
        with torch.cuda.stream(self._stream):
            while time.perf_counter() < until:
                self._graph.replay()
                self._stream.synchronize()
            for _ in range(replays):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._graph.replay()
                end.record()
                end.synchronize()
                samples.append(begin.elapsed_time(end) * 1e3 / self._count)
        return median(samples)


def interleaved(graphs: Mapping[str, Graph], rounds: int) -> dict[str, Time]:
    """Times every graph once a round, in an order of its own."""
    order, found = random.Random(0), {name: list[float]() for name in graphs}
    for _ in range(rounds):
        names = list(graphs)
        order.shuffle(names)
        for name in names:
            found[name].append(graphs[name].us())
    return {name: Time.of(samples) for name, samples in found.items()}
