"""What the GPU back ends share: the plain MLX paths, and kernels that MLX compiles from text.

No kernel is trusted unseen. Before a tile runs for the first time on a dtype, geometry and layout,
it must give a known answer here; one that doesn't is refused with the reason, and MLX's paths run.

The layers of a decode step pass one shape and one plan, the same objects: all that follows from
them is worked out by the first layer, and a look at the two is what it costs the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from ..device import MLX_VERSION
from ..plan import Plan
from ..shapes import Geometry, Shape, piece_tokens
from . import Call
from .mlx_paths import MlxBackend
from .self_check import LENGTH, fault
from .shaders import Text, digest

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_PROVEN_DTYPES = ("bfloat16", "float16")  # what models decode in; others are proven at first use
_TRIES = 3  # of a proof that ends in an error: memory may be short for a moment
_NOTHING_NEW_S = 0.2  # a proof that takes longer compiles
_REMEMBERED = 64  # launches, so that threads don't overtake each other at once

Kernel = Callable[..., list[mx.array]]


class Pass(NamedTuple):
    """A kernel of MLX, how it is launched and, for `_native`, what it was made of."""

    kernel: Kernel
    launch: dict[str, Any]
    making: dict[str, Any] | None = None

    def __call__(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        return self.kernel(inputs=inputs, **self.launch)


class Launches(NamedTuple):
    """What a plan comes to on a shape."""

    plan: Plan
    shape: Shape
    with_lse: bool
    ran: Plan  # with the tile's name, and as many partitions as the context has pieces
    piece: int  # tokens of a partition
    call: Callable[..., Sequence[mx.array]]  # from inputs to output and, it may be, LSE
    facts: dict[str, object]


class Kind(NamedTuple):
    """What is proven at once."""

    tile: str
    split: bool
    dtype: str
    geometry: Geometry
    layout: str
    want_lse: bool


class JitBackend(MlxBackend, ABC):
    """Launches native plans through `mx.fast.*_kernel`; compiles nothing before first use."""

    _proven_length = LENGTH  # tokens of a sequence in a proof
    _lse_apart = False  # whether a split whose LSE is wanted has another merge

    def __init__(self, name: str, title: str, proven: tuple[Shape, ...]) -> None:
        """`title`: the kind of kernels, for people; `proven`: shapes for the self-check."""
        super().__init__(name)
        self._title, self._proven = title, proven
        self._proofs: dict[Kind, str | None] = {}
        self._errors: defaultdict[Kind, list[float]] = defaultdict(list)  # seconds of each try
        self._proving = Lock()
        self._compiled: list[tuple[str, float]] = []
        self._passed: tuple[Plan, Shape, bool] | None = None  # what `refusal` let pass last
        self._ready: Launches | None = None  # what ran last
        self._launched: deque[tuple[int, Launches]] = deque(maxlen=_REMEMBERED)

    # --- what a kind of device adds

    @abstractmethod
    def _missing(self) -> str:
        """Why no kernel can run here; "" where one might."""

    @abstractmethod
    def _read(self) -> dict[str, Text]:
        """The texts of the kernels that compute, by name. Raises OSError where they are gone."""

    @abstractmethod
    def _useful(self, shape: Shape) -> tuple[str, ...]:
        """Tiles worth trying, the default first."""

    @abstractmethod
    def _illegal(self, name: str, shape: Shape) -> str | None:
        """Why the tile of that name can't take the shape; None if it can."""

    @abstractmethod
    def _decode(self, name: str, shape: Shape, piece: int) -> tuple[Pass, dict[str, object]]:
        """One pass over the cache in pieces of so many tokens, and facts about it."""

    @abstractmethod
    def _merge(self, shape: Shape, piece: int, want_lse: bool) -> Pass:
        """From partial outputs and their sums to the output and, where it is wanted, its LSE."""

    @abstractmethod
    def _inputs(self, call: Call, piece: int) -> Sequence[mx.array]:
        """What `_decode`'s kernel takes; its results are what `_merge`'s takes."""

    def _piece(self, shape: Shape, partitions: int) -> int:
        """Tokens of a piece."""
        return piece_tokens(shape.context, partitions)

    @abstractmethod
    def _joined(self, decode: Pass, merge: Pass | None) -> Callable[..., Sequence[mx.array]]:
        """Both passes as one call."""

    def _device_fault(self, name: str) -> str | None:
        """What that tile expects of the device and doesn't find."""
        return None

    # --- the protocol

    def digest(self) -> str:
        return self._texts[1]

    def available(self) -> tuple[bool, str]:
        return self._able

    @cached_property
    def _able(self) -> tuple[bool, str]:
        reason, function = self._missing(), f"{self.name}_kernel"
        if not reason and not hasattr(mx.fast, function):
            reason = f"this MLX ({MLX_VERSION}) has no mx.fast.{function}"
        if not reason and not self._texts[1]:
            reason = f"the {self._title} kernels' texts are not installed: reinstall mla-tuner"
        return not reason, reason

    @cached_property
    def _texts(self) -> tuple[dict[str, Text], str]:
        """The kernels' texts by name, and their digest; "" where none are."""
        try:
            texts = self._read()
        except OSError:
            return {}, ""
        return texts, digest(texts.values())

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        return self._useful(shape) if self.available()[0] else ()

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        passed = self._passed
        if passed and passed[0] is plan and passed[1] is shape and passed[2] is want_lse:
            return None
        if not plan.native:
            return super().refusal(plan, shape, want_lse)
        able, why = self.available()
        if not able:
            return why
        name, split = self._tile(plan, shape), plan.cut(shape.context).partitions > 1
        reason = self._illegal(name, shape) or self._disproof(name, split, shape, want_lse)
        if reason is None:
            self._passed = plan, shape, want_lse
        return reason

    def run(self, plan: Plan, call: Call) -> tuple[mx.array, mx.array | None]:
        ready = self._ready
        if (
            ready is None
            or ready.plan is not plan
            or ready.shape is not call.shape
            or ready.with_lse is not call.want_lse
        ):
            if not plan.native:
                return super().run(plan, call)
            ready = self._ready = self._prepared(plan, call.shape, call.want_lse)
        results = ready.call(*self._inputs(call, ready.piece))
        self._launched.append((call.ticket, ready))
        return results[0], results[1] if len(results) > 1 else None

    def executed(self, ticket: int) -> Plan | None:
        """What was put into the graph for that call: evaluating the result runs it."""
        launched = self._launch(ticket)
        return None if launched is None else launched.ran

    def detail(self, ticket: int) -> dict[str, object]:
        launched = self._launch(ticket)
        return {} if launched is None else launched.facts

    def _launch(self, ticket: int) -> Launches | None:
        return next((ready for known, ready in tuple(self._launched) if known == ticket), None)

    def compiled(self) -> tuple[tuple[str, float], ...]:
        """One entry a proof that met a kernel for the first time and could run it, however often it
        was tried: what it took is compilation.
        """
        return tuple(self._compiled)

    def self_check(self) -> tuple[bool, str]:
        return self._self_checked

    @cached_property
    def _self_checked(self) -> tuple[bool, str]:
        for dtype in _PROVEN_DTYPES:
            for shape in self._proven:
                for plan in (Plan("single"), Plan("split", 2)):
                    found = self.refusal(plan, replace(shape, dtype=dtype), want_lse=True)
                    if found:
                        return False, found
        return True, f"the {self._title} kernels agree with mlx_rows"

    # --- its parts

    def _tile(self, plan: Plan, shape: Shape) -> str:
        """The plan's tile, or the default; "" where no tile is for the shape."""
        return plan.tile or next(iter(self._useful(shape)), "")

    def _prepared(self, plan: Plan, shape: Shape, want_lse: bool) -> Launches:
        name = self._tile(plan, shape)
        ran = Plan(plan.path, plan.partitions, name).cut(shape.context)
        piece = self._piece(shape, ran.partitions)
        decode, facts = self._decode(name, shape, piece)
        merge = self._merge(shape, piece, want_lse) if ran.partitions > 1 else None
        facts = {**facts, "launches": 1 if merge is None else 2}
        call = self._joined(decode, merge)
        return Launches(plan, shape, want_lse, ran, piece, call, facts)

    def _disproof(self, name: str, split: bool, shape: Shape, want_lse: bool) -> str | None:
        """Why a tile must not be trusted here; None once it gave the right answer."""
        # Serving seldom needs an LSE: what it alone takes is compiled when it is asked for.
        lse = want_lse or not (split and self._lse_apart)
        kind = Kind(name, split, shape.dtype, shape.geometry, shape.layout, lse)
        if kind not in self._proofs:
            with self._proving:  # others wait for the answer instead of asking again
                if kind not in self._proofs:
                    return self._tried(kind)
        return self._proofs[kind]

    def _tried(self, kind: Kind) -> str | None:
        name, split, dtype, geometry, layout, want_lse = kind
        plan = Plan("split", 3, name) if split else Plan("single", 1, name)
        errors, started = self._errors[kind], perf_counter()
        try:
            found = self._device_fault(name)
            sizes = dtype, geometry, layout, self._proven_length
            found = found or fault(self, plan, *sizes, want_lse)
            settled = True
        except Exception as error:  # a compile error, too many threads, no memory: serving goes on
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            errors.append(perf_counter() - started)
            settled = len(errors) == _TRIES
        else:
            seconds = max([perf_counter() - started, *errors])  # the longest try compiled
            if seconds > _NOTHING_NEW_S:
                what = f"{name} {plan.path} {dtype} {geometry} {layout}"
                self._compiled.append((what, seconds))
        reason = f"tile {name} failed its check here: {found}" if found else None
        if settled:
            self._proofs[kind] = reason
        return reason


def leading(shape: Shape, pieces: int) -> tuple[int, int, int]:
    """Dimensions before `kv_lora_rank`: of partial answers, or of results."""
    if pieces > 1:
        return shape.batch, pieces, shape.rows
    return shape.batch, shape.heads, shape.q_len


def count(shape: Shape, piece: int) -> int:
    """Pieces of the longest sequence."""
    return max(1, -(-shape.context // piece))
