"""GPU time of queued work: a kernel that holds the queue until all of it is there, and a clock.

A model's other layers keep a GPU's queue full, so a call costs its GPU time as long as the host is
ahead. A chain of nothing but short calls is not: the GPU waits for the host, and what is measured
is the host. So the GPU waits first, while the host queues the chain; then nothing holds it up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from .shaders import text

LONGEST_S = 0.05  # that the kernel waits; the text has the same bound
_TICK_S = 20e-6  # that it may be late or early, much more than such clocks are
_CHECKED_S = 1e-3

_async_eval: Any = mx.async_eval  # MLX's stubs give it no types


class Timed(NamedTuple):
    """What a chain took. ahead: all of it was queued before any of it ran; host_s: of queueing."""

    gpu_s: float
    host_s: float
    ahead: bool


class Stamp(NamedTuple):
    """When the kernel began and ended by the GPU's clock: nanoseconds, uint64 `[1]` each.

    MLX keeps arrays of 8 bytes where host and GPU both reach them. A larger one moves to the host
    when the host reads it, and its memory comes back to the GPU by page faults, 0.1 to 1 ms each,
    which were in the time of chains (one H200, MLX 0.32.4, 2026-12-01).
    """

    began: mx.array
    ended: mx.array


Launch = Callable[[float, mx.array], Stamp]


class HeadStart:
    """Times chains of calls by the GPU's own clock, on MLX's default stream."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._nothing = mx.zeros((8,), mx.uint16)

    def time(self, chain: mx.array, head_start_s: float) -> Timed:
        """From the end of a head start to the end of a chain, which nobody has evaluated yet.

        head_start_s: at most `LONGEST_S` are waited. chain: its last result. Its own graph follows
        that of the head start in the same stream, so they need no data in common; the way from the
        one to the other, 6 to 8 us, is in the chain's time.
        """
        head_start_s = min(head_start_s, LONGEST_S)
        stop = self._launch(0.0, chain.view(mx.uint16))
        started = perf_counter()
        start = self._launch(head_start_s, self._nothing)
        _async_eval(start.ended)  # now, in a graph of its own: it waits while the chain is encoded
        _async_eval(stop.began)
        host_s = perf_counter() - started
        gpu_ns = _read(stop.began) - _read(start.ended)
        return Timed(gpu_ns * 1e-9, host_s, host_s < head_start_s)

    def fault(self) -> str:
        """What is wrong with the clock here; "" where a wait takes as long as it was asked for."""
        mx.eval(self._nothing)
        mx.eval(self._launch(0.0, self._nothing).ended)  # compiles
        started = perf_counter()
        waited = self._launch(_CHECKED_S, self._nothing)
        inside_s = (_read(waited.ended) - _read(waited.began)) * 1e-9
        outside_s = perf_counter() - started
        if _CHECKED_S - _TICK_S <= inside_s <= outside_s + _TICK_S:
            return ""
        return f"{_CHECKED_S:g} s are {inside_s:.3g} s by the GPU, {outside_s:.3g} s by the host"


def _read(nanoseconds: mx.array) -> int:
    found: Any = nanoseconds.item()
    return int(found)


def head_start(backend: str) -> HeadStart | None:
    """None where there is none: on a CPU, on Metal, and where the kernel does not run as it should.

    Called where MLX's default device is that back end's.
    """
    if backend != "cuda":
        return None
    try:
        found = HeadStart(_compiled())
        return None if found.fault() else found
    except Exception:  # whatever a compiler or a driver makes of it: chains are timed as elsewhere
        return None


def _compiled() -> Launch:
    """The kernel; MLX compiles it when it first runs. Raises OSError without its text."""
    kernel: Any = mx.fast.cuda_kernel(
        name="mla_head_start",
        input_names=("wait_us", "after"),
        output_names=("began", "ended"),
        header="",
        source=text((), "cuda/head_start.body.cu").body,
        ensure_row_contiguous=False,
        shared_memory=0,
    )

    def launch(wait_s: float, after: mx.array) -> Stamp:
        return Stamp(
            *kernel(
                inputs=[_microseconds(round(wait_s * 1e6)), after],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(1,), (1,)],
                output_dtypes=[mx.uint64] * 2,
            )
        )

    return launch


@lru_cache(maxsize=256)
def _microseconds(count: int) -> mx.array:
    return mx.array([count], mx.int32)
