"""The forms that are timed: our kernel and MLX's paths through the public op, and PyTorch's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mla_tuner import last_run, mla_decode
from mla_tuner.backends import get
from mla_tuner.caches import PagedCache
from mla_tuner.candidates import row_groups
from mla_tuner.cases import Case, check, make_case, reference
from mla_tuner.plan import Plan
from mla_tuner.shapes import DTYPE_BYTES, Shape, pieces
from tools.peers import torch_cpu

from .rounds import Form, timed


class Errors(dict[str, float]):
    """Largest row error of each form against float64, filled while forms are made."""


def set_threads(threads: int) -> None:
    """Threads of our kernel's pool, and of torch's where it is there."""
    get("cpu").available()  # first: the back end sets the threads itself when it loads the kernel
    importlib.import_module("mla_tuner._native").set_threads(threads)
    if torch_cpu.available():
        torch_cpu.set_threads(threads)


def use_isa(name: str) -> None:
    """Holds our kernel to one instruction set; "" lets it choose by shape."""
    get("cpu").available()
    importlib.import_module("mla_tuner._native").set_isa(name)


def paged_case(heads: int, context: int, dtype: str) -> Case:
    """One sequence in shuffled blocks of 32 tokens, geometry 512+64."""
    return make_case(Shape(context, 1, heads, dtype), seed=heads)


def checked_rows(shape: Shape) -> list[int]:
    """A few rows, spread over the heads: the float64 truth of all would take minutes."""
    return sorted({*range(0, shape.rows, max(1, shape.rows // 4)), shape.rows - 1})


def call(case: Case, plan: Plan) -> Callable[[], None]:
    """Build and evaluate the op, as serving does."""

    def run() -> None:
        mx.eval(mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan))

    return run


def op_form(case: Case, plan: Plan, errors: Errors, kind: str = "own") -> Form:
    """A form of the public op, after one run that was right and executed this very plan.

    Raises:
        RuntimeError: it was wrong, or another plan ran.
    """
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
    )
    mx.eval(out, lse)
    run = last_run()
    if run is None or run.executed != plan:
        raise RuntimeError(f"{case.shape}: asked for {plan}, but {run and run.executed} ran")
    found = check(case, out, lse, plan, checked_rows(case.shape))
    if not found.ok:
        raise RuntimeError(f"{case.shape}: {plan} is wrong: {found.reason}")
    errors[str(plan)] = found.max_error
    return Form(str(plan), kind, timed(call(case, plan)))


def native_plans(shape: Shape, threads: int) -> list[Plan]:
    """Plans that can keep `threads` threads busy, each tile and few partitions."""
    backend = get("cpu")
    plans: list[Plan] = []
    for tile in backend.tiles(shape):
        if threads == 1 or row_groups(shape.rows, tile) >= threads:
            plans.append(Plan("single", 1, tile))
        for partitions in (threads, 2 * threads) if threads > 1 else ():
            if pieces(shape.context, partitions) == partitions:
                plans.append(Plan("split", partitions, tile))
    return [plan for plan in plans if backend.refusal(plan, shape) is None]


def default_tile(shape: Shape) -> str:
    return get("cpu").tiles(shape)[0]


def own_forms(case: Case, threads: int, errors: Errors) -> list[Form]:
    return [op_form(case, plan, errors) for plan in native_plans(case.shape, threads)]


def torch_forms(case: Case, errors: Errors) -> list[Form]:
    """Every PyTorch form of a one-sequence case, on a dense copy of the same numbers."""
    rank, dtype = case.shape.geometry.kv_lora_rank, case.shape.dtype
    queries = [q for q in (case.q_nope, case.q_pe) if q is not None]
    q = torch_cpu.tensor(_rows(mx.concatenate(queries, axis=-1)[0, :, 0]), dtype)
    latent = torch_cpu.tensor(_rows(_dense_tokens(case)), dtype)
    found: list[Form] = []
    for name, run in torch_cpu.forms(q, latent, rank, case.scale).items():
        errors[name] = _torch_error(case, run())
        found.append(Form(name, "peer", timed(run)))
    return found


def _dense_tokens(case: Case) -> mx.array:
    """The cached tokens in order, `[context, width]`."""
    cache = case.cache
    assert isinstance(cache, PagedCache)
    blocks = -(-case.shape.context // cache.latent.shape[1])
    taken = cache.latent[cache.block_tables[0, :blocks]]
    return taken.reshape(-1, taken.shape[-1])[: case.shape.context]


def _rows(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


def _torch_error(case: Case, out: Any) -> float:
    rows = checked_rows(case.shape)
    want = reference(case, rows)[0][0]
    got = out[rows].double().numpy()
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(error.max())


def partial_bytes(shape: Shape, partitions: int) -> int:
    """What a split call needs beyond its inputs: output, LSE, and fp32 partials of both."""
    numbers = shape.batch * shape.rows
    out = numbers * shape.geometry.kv_lora_rank
    partials = partitions * (out + numbers) * 4 if partitions > 1 else 0
    return out * DTYPE_BYTES[shape.dtype] + numbers * 4 + partials
