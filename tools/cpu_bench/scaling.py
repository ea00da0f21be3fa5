"""Does time grow linearly with the context, and what memory does a call take beyond its inputs?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mla_tuner.plan import Plan

from . import kernels
from .kernels import Errors
from .results import Figure, FormTime, Results
from .rounds import Form, Rounds, interleave
from .sections import Options, short

CONTEXTS = tuple(1 << k for k in range(12, 19))  # 4K..256K
LINEAR_TARGET = 15  # % off the time that 4K promises
MEMORY_PARTITIONS = 8
SCRATCH_BYTES = 1 << 20  # a thread's converted tile and packed queries


def linear(options: Options, results: Results) -> None:
    """Heads 16 bfloat16 from 4K to 256K, in the same rounds; then memory at the longest."""
    for threads in options.threads:
        _growth(threads, options, results)
    _memory(options, results)


def _growth(threads: int, options: Options, results: Results) -> None:
    kernels.set_threads(threads)
    cases = {n: kernels.paged_case(16, options.context(n), "bfloat16") for n in CONTEXTS}
    plan = Plan("single") if threads == 1 else Plan("split", threads)
    plan = Plan(plan.path, plan.partitions, kernels.default_tile(cases[CONTEXTS[0]].shape))
    forms = []
    for context, case in cases.items():
        made = kernels.op_form(case, plan, Errors())
        forms.append(Form(f"{plan} at {context >> 10}K", "length", made.sample))
    rounds = interleave(forms, threads=threads, seconds=4 * options.seconds)
    per_token = []
    for form, case in zip(forms, cases.values(), strict=True):
        best = rounds.min(form.name)
        per_token.append(best / case.shape.context)
        results.forms.append(_form_time(rounds, form, short(case.shape), case.shape.flop))
    growth = [t / per_token[0] for t in per_token]
    worst = max(growth, key=lambda g: abs(g - 1))
    figure = Figure(
        *("linear", "time per token, worst against 4K", "heads 16 4K..256K bfloat16", threads),
        *(100 * abs(worst - 1), "%", LINEAR_TARGET, False),
    )
    note = "x4K: " + " ".join(f"{g:.2f}" for g in growth)
    results.figures.append(figure.of(rounds, forms[-1].name, note))


def _form_time(rounds: Rounds, form: Form, shape: str, flop: int) -> FormTime:
    best, median = rounds.min(form.name), rounds.median(form.name)
    return FormTime(
        *("linear", shape, rounds.threads, form.name, form.kind, len(rounds.samples(form.name))),
        *(1e6 * best, 1e6 * median, flop / best / 1e9, 1.0, None),
    )


def _memory(options: Options, results: Results) -> None:
    """Memory of one split call at 256K beyond its inputs, by MLX's count and by the system's."""
    threads = max(options.threads)
    kernels.set_threads(threads)
    case = kernels.paged_case(16, options.context(CONTEXTS[-1]), "bfloat16")
    plan = Plan("split", MEMORY_PARTITIONS, kernels.default_tile(case.shape))
    run = kernels.call(case, plan)
    kernels.call(kernels.paged_case(16, 4096, "bfloat16"), plan)()  # pool and scratch exist
    expected = kernels.partial_bytes(case.shape, MEMORY_PARTITIONS)
    allowed = expected + threads * SCRATCH_BYTES
    for what, used in (("MLX's peak", _mlx_bytes(run)), ("resident peak", _resident_bytes(run))):
        if used is None:
            results.notes.append("resident peak not measured: /proc does not let it be reset")
            continue
        cache = case.shape.cache_bytes
        note = f"output and partials {expected / 1e6:.2f} MB, the cache {cache / 1e6:.0f} MB"
        results.figures.append(
            Figure(
                *("linear", f"memory beyond inputs, {what}", short(case.shape), threads),
                *(used / 1e6, "MB", allowed / 1e6, False),
                form=str(plan),
                note=note,
            )
        )


def _mlx_bytes(run: Callable[[], None]) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


def _resident_bytes(run: Callable[[], None]) -> int | None:
    """Growth of this process's resident peak during one call; None where it can't be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if not found:
        raise OSError(f"no {name} in /proc/self/status")
    return int(found.group(1)) * 1024
