"""Back ends: each runs one plan on one kind of device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from itertools import count
from threading import Lock
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..caches import Cache
from ..plan import Plan
from ..shapes import Shape

NAMES = ("cpu", "metal", "cuda")
next_ticket = count(1).__next__  # a call's number; atomic, so threads share it


class Call(NamedTuple):
    """A decode call that passed the front door.

    q_nope: `[batch, heads, q_len, kv_lora_rank]`; q_pe: `[batch, heads, q_len, rope_dim]`, or None
    where rope_dim is 0. lengths and starts: one int per sequence. ticket: unique in the process.
    """

    q_nope: mx.array
    q_pe: mx.array | None
    cache: Cache
    scale: float
    shape: Shape
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    ticket: int
    want_lse: bool = False


class Backend(Protocol):
    """What every back end offers; nothing here raises for a plan that `refusal` let pass."""

    @property
    def name(self) -> str:
        """One of `NAMES`."""

    def digest(self) -> str:
        """Digest of the native kernels' source; "" where there are none."""

    def available(self) -> tuple[bool, str]:
        """Whether the native kernels can run here, and why not."""

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        """Tiles for a shape, the default first; empty without native kernels.

        They follow from its rows, dtype, geometry and layout: context and batch don't count.
        """

    def signature(self, *arrays: mx.array | None) -> Hashable:
        """A key that is equal for arrays of equal dtypes and shapes; TypeError for what is none."""

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        """One sentence why this plan can't run on this shape; None if it can.

        want_lse: with its LSE, too, which may be a kernel of its own. May compile and run kernels.
        """

    def proof(self, plan: Plan, shape: Shape) -> tuple[bool, str]:
        """Whether the kernel that would run this plan gives right answers here, and why not; runs
        it once at most, never raises.
        """

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        """Lazy output `[batch, heads, q_len, kv_lora_rank]` and, if wanted, its LSE."""

    def executed(self, ticket: int) -> Plan | None:
        """The native plan that really ran for that call; None: not yet evaluated, or overtaken."""

    def detail(self, ticket: int) -> dict[str, object]:
        """Facts about that execution (isa, threads, tasks); empty where `executed` is None."""

    def compiled(self) -> Sequence[tuple[str, float]]:
        """Kernels that were compiled in this process so far, and the seconds that each took."""

    def self_check(self) -> tuple[bool, str]:
        """Whether the native kernels give right answers here; runs them once, never raises."""


@cache
def get(name: str) -> Backend:
    """The back end of that name, one object per process.

    Raises:
        ValueError: the name is not in `NAMES`.
    """
    with _making:  # `cache` alone lets threads that come together make one each
        return _make(name)


_making = Lock()


@cache
def _make(name: str) -> Backend:
    if name == "cpu":
        from .cpu import CpuBackend

        return CpuBackend()
    if name == "metal":
        from .metal import MetalBackend

        return MetalBackend()
    if name == "cuda":
        from .cuda import CudaBackend

        return CudaBackend()
    raise ValueError(f"[backends.get] expected a name in {NAMES}; got {name!r}")
