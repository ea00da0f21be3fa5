"""What the package costs beside the kernel: the op's overhead, the look-up, the import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from mla_tuner import device as devices
from mla_tuner import mla_decode
from mla_tuner.backends import get
from mla_tuner.cases import Case
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import CONTEXT_GRID, DTYPES, bucket_of
from mla_tuner.table import Row

from . import kernels
from .kernels import Errors
from .results import Figure, FormTime, Results
from .rounds import Form, interleave, timed
from .sections import Options, short

OVERHEAD_TARGET_US = 10
DECIDE_TARGET_US = 1.5
IMPORT_TARGET_MS = 60
# What serving must not load (design: stdlib and mlx only).
FOREIGN = ("optuna", "sqlite_utils", "pydantic", "click", "rich", "numpy")
CALLS = 100
LAYERS = 60  # about as many as the models have


def overhead(options: Options, results: Results) -> None:
    """Build and eval of the op on tiny shapes, over mx.add of two numbers.

    In a chain of layers, as serving calls it, and alone. Alone, mx.add waits as long as the op
    takes to build before it is built: MLX's stream thread falls asleep in that time, whoever
    spends it.
    """
    kernels.set_threads(1)
    for heads, target in ((1, OVERHEAD_TARGET_US), (16, None)):
        case = kernels.paged_case(heads, 1, "bfloat16")
        plan = Plan("single", 1, kernels.default_tile(case.shape))
        kernels.op_form(case, plan, Errors())
        for how, pair in (("chained", _chained(case, plan)), ("alone", _alone(case, plan))):
            _above(how, case, pair, target, options, results)


HUGE_PAGES = "glibc.malloc.hugetlb=1"


def use_pages(size: str) -> None:
    """Starts this process anew where malloc does not give pages of that size yet."""
    others = [t for t in os.environ.get("GLIBC_TUNABLES", "").split(":") if t and t != HUGE_PAGES]
    wanted = ":".join([*others, HUGE_PAGES] if size == "huge" else others)
    if wanted != os.environ.get("GLIBC_TUNABLES", ""):
        os.environ["GLIBC_TUNABLES"] = wanted
        os.execv(sys.executable, sys.orig_argv)


Pair = tuple[Form, Form]  # the trivial op, and ours


def _chained(case: Case, plan: Plan) -> Pair:
    def decode(q: mx.array) -> mx.array:
        return mla_decode(q, case.q_pe, case.cache, scale=case.scale, plan=plan)

    def add(x: mx.array) -> mx.array:
        return mx.add(x, one)

    def each(step: Callable[[mx.array], mx.array], first: mx.array) -> Callable[[], float]:
        def chain() -> None:
            y = first
            for _ in range(LAYERS):
                y = step(y)
            mx.eval(y)

        sample = timed(chain)
        return lambda: sample() / LAYERS

    one = mx.array([1.0])
    return (
        Form(f"mx.add, {LAYERS} chained", "trivial", each(add, one)),
        Form(f"{plan}, {LAYERS} chained", "own", each(decode, case.q_nope)),
    )


def _alone(case: Case, plan: Plan) -> Pair:
    def build() -> mx.array:
        return mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan)

    one = mx.array([1.0])
    sample_build = timed(build, CALLS)
    build_s = min(sample_build() for _ in range(20))
    sample_add = timed(_after(build_s, lambda: mx.eval(mx.add(one, one))), CALLS)
    return (
        Form("mx.add, alone", "trivial", lambda: sample_add() - build_s),
        Form(f"{plan}, alone", "own", timed(kernels.call(case, plan), CALLS)),
    )


def _after(delay_s: float, run: Callable[[], None]) -> Callable[[], None]:
    def delayed() -> None:
        until = time.perf_counter() + delay_s
        while time.perf_counter() < until:
            pass
        run()

    return delayed


def _above(
    how: str,
    case: Case,
    pair: Pair,
    target: float | None,
    options: Options,
    results: Results,
) -> None:
    """What one op takes more than the trivial one, and the times of both."""
    rounds = interleave(pair, threads=1, seconds=2 * options.seconds)
    times = [(rounds.min(form.name), rounds.median(form.name)) for form in pair]
    for form, (best, median) in zip(pair, times, strict=True):
        results.forms.append(
            FormTime(
                *("overhead", short(case.shape), 1, form.name, form.kind, rounds.count),
                *(1e6 * best, 1e6 * median, 0.0, best / times[1][0], None),
            )
        )
    above = 1e6 * (times[1][1] - times[0][1])
    figure = Figure(
        *("overhead", f"build+eval over mx.add, {how}", short(case.shape), 1, above, "us"),
        *(target, False),
    )
    note = f"medians; by minimum {1e6 * (times[1][0] - times[0][0]):.1f} us"
    results.figures.append(figure.of(rounds, pair[1].name, note))


def policy(options: Options, results: Results) -> None:
    """The look-up in a warm process, then imports in fresh ones."""
    _decide(options, results)
    _imports(results, processes=max(3, round(9 * min(1.0, options.seconds))))


def _tuned_policy() -> tuple[Policy, list[tuple[int, int, int, str]]]:
    """A policy with a few hundred tuned buckets, and the shapes it is asked for."""
    shapes = [
        (context, batch, heads, dtype)
        for context in CONTEXT_GRID[:12]
        for batch in (1, 2, 4, 8)
        for heads in (16, 128)
        for dtype in DTYPES
    ]
    kernel = get("cpu").digest()
    rows = [
        Row(bucket_of(*shape), MLX, 1.0, 1.0, None, None, "", kernel, devices.MLX_VERSION)
        for shape in shapes
    ]
    return Policy(devices.probe("cpu"), rows), shapes


def _decide(options: Options, results: Results) -> None:
    warm, shapes = _tuned_policy()
    for shape in shapes:
        warm.decide(*shape)
    opened: list[object] = []
    watching = [True]

    def watch(event: str, args: tuple[object, ...]) -> None:
        if watching[0] and event in ("open", "sqlite3.connect"):
            opened.append(args[0])

    sys.addaudithook(watch)  # can't be taken away again, only told to look away
    samples: list[float] = []
    until = time.perf_counter() + options.seconds
    while time.perf_counter() < until or len(samples) < 10:
        start = time.perf_counter()
        for context, batch, heads, dtype in shapes:
            warm.decide(context, batch, heads, dtype)
        samples.append((time.perf_counter() - start) / len(shapes))
    watching[0] = False
    results.figures.append(
        Figure(
            *("policy", "policy.decide, warm median", f"{len(shapes)} buckets", 1),
            *(1e6 * statistics.median(samples), "us", DECIDE_TARGET_US, False),
            note=f"best {1e6 * min(samples):.2f} us",
        )
    )
    results.figures.append(
        Figure(
            *("policy", "files opened by policy.decide", f"{len(samples)} passes", 1),
            *(len(opened), "files", 0, False),
        )
    )


_SCRIPT = """
import json, sys, time
start = time.perf_counter()
import mlx.core
middle = time.perf_counter()
import mla_tuner
end = time.perf_counter()
from mla_tuner.policy import Policy
Policy.load().decide(32768, 1, 16, "bfloat16")
print(json.dumps([middle - start, end - middle, sorted(set(sys.argv[1:]) & set(sys.modules))]))
"""


def _imports(results: Results, processes: int) -> None:
    answers = [_fresh_import() for _ in range(processes)]
    added = [1e3 * answer[1] for answer in answers]
    loaded = sorted({name for answer in answers for name in answer[2]})
    base = 1e3 * statistics.median(answer[0] for answer in answers)
    results.figures.append(
        Figure(
            *("policy", "import mla_tuner over import mlx.core", f"{processes} processes", 1),
            *(statistics.median(added), "ms", IMPORT_TARGET_MS, False),
            note=f"best {min(added):.1f} ms; import mlx.core itself {base:.0f} ms",
        )
    )
    results.figures.append(
        Figure(
            *("policy", "foreign modules loaded by import and decide", ", ".join(FOREIGN), 1),
            *(len(loaded), "modules", 0, False),
            note=", ".join(loaded),
        )
    )


def _fresh_import() -> tuple[float, float, Sequence[str]]:
    """Seconds of import mlx.core and of import mla_tuner after it, and the foreign modules."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *FOREIGN],
        env=os.environ | {"MLA_TUNER_DB": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    base, added, loaded = json.loads(done.stdout)
    return base, added, loaded
