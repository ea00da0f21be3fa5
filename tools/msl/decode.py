"""`mla_decode` on the Metal back end, with the emulator in the place of an Apple GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import mlx.core as mx

from mla_tuner import ops
from mla_tuner.backends.metal import MetalBackend
from mla_tuner.cases import Case
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

from .stand_in import Launch, emulated


class EmulatedBackend(MetalBackend):
    """Runs its tiles unproven: whoever uses this is about to find out."""

    def available(self) -> tuple[bool, str]:
        return True, ""

    def _disproof(self, name: str, split: bool, shape: Shape, want_lse: bool) -> str | None:
        return None


@dataclass(frozen=True)
class Decoded:
    """A decode, done: output, LSE, and the launches that it took."""

    out: mx.array
    lse: mx.array
    launches: list[Launch]


def decode(
    case: Case,
    plan: Plan,
    mode: str = "fast",
    *,
    shuffle: int | None = None,
    edit: Callable[[str], str] | None = None,
) -> Decoded:
    """One call of the product's front door; the arguments after `plan` are those of `emulated`.

    Raises:
        EmulationError: a kernel did what it must not.
        ValueError: the front door or the back end refuses the call.
    """
    backend = EmulatedBackend()
    with emulated(mode, shuffle, edit) as launches, patch.object(ops, "_backend", lambda: backend):
        out, lse = ops.mla_decode(
            case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
        )
        mx.eval(out, lse)
        run = ops.last_run()
    if run is None or run.executed is None or run.executed != plan.cut(case.shape.context):
        raise RuntimeError(f"[decode] expected {plan} to run; got {run}")
    return Decoded(out, lse, launches)
