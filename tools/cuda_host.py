"""What a decode call costs the host inside MLX's CUDA build: `python -m tools.cuda_host`.

Ours, by `mla_decode` with a plan, beside the plain form of the same two kernels: two calls of
`mx.fast.cuda_kernel` from Python with the whole texts inline, without any check. Both run as chains
of 216 calls on the same caches, in turns; microseconds a call of building the graph and encoding
it, and of all of it, medians over rounds. Exits with 1 where no CUDA kernel can run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from mla_tuner import backends, device
from mla_tuner.backends import Call, next_ticket
from mla_tuner.backends.cuda import CudaBackend
from mla_tuner.backends.shaders import minified
from mla_tuner.cases import Case
from mla_tuner.ops import mla_decode
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

from .cuda_check import Ring

CHAIN = 216
Step = Callable[[Case, mx.array], mx.array]  # the answer of a case for other queries
_INCLUDE = re.compile(r'#include "([^"]+)"\n?')
_async_eval: Any = mx.async_eval  # MLX's stubs give it no types


def inlined(text: str, folder: Path = Path()) -> str:
    """The text with its files in place of its includes."""

    def content(found: re.Match[str]) -> str:
        path = folder / found[1]
        return inlined(path.read_text(encoding="utf-8"), path.parent)

    return _INCLUDE.sub(content, text)


def whole(making: dict[str, Any]) -> dict[str, Any]:
    """What a kernel is made of, with all of its text, short of comments and blanks."""
    return {**making, "header": minified(inlined(making["header"])) + "\n"}


@contextmanager
def whole_texts() -> Iterator[None]:
    """While it is open, kernels are made of texts without includes."""
    fast: Any = mx.fast
    made = fast.cuda_kernel
    fast.cuda_kernel = lambda **making: made(**whole(making))
    try:
        yield
    finally:
        fast.cuda_kernel = made


def ours(plan: Plan) -> Step:
    return lambda case, q: mla_decode(q, case.q_pe, case.cache, scale=case.scale, plan=plan)


def plain(plan: Plan, shape: Shape, cases: list[Case]) -> Step:
    backend = CudaBackend()
    backend._native_launches = False
    lengths, starts = shape.all_lengths, (0,) * shape.batch
    with whole_texts():
        ready = backend._prepared(plan, shape, False)
    inputs = {}
    for case in cases:
        call = Call(
            case.q_nope, case.q_pe, case.cache, case.scale, shape, lengths, starts, next_ticket()
        )
        inputs[id(case)] = backend._inputs(call, ready.piece)[1:]

    def step(case: Case, q: mx.array) -> mx.array:
        return ready.call(q, *inputs[id(case)])[0]

    return step


def chain(step: Step, cases: list[Case]) -> tuple[float, float, float]:
    """Seconds of building, encoding and all of it."""
    started = time.perf_counter()
    out = cases[0].q_nope
    for i in range(CHAIN):
        out = step(cases[i % len(cases)], out)
    built = time.perf_counter()
    _async_eval(out)
    encoded = time.perf_counter()
    mx.synchronize()
    return built - started, encoded - built, time.perf_counter() - started


def measured(forms: dict[str, Step], cases: list[Case], rounds: int) -> dict[str, Any]:
    """By form its medians, and the median of the ratio of a round's host costs."""
    for step in forms.values():
        chain(step, cases)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, step in forms.items():
            samples[name].append(chain(step, cases))
    found: dict[str, Any] = {}
    for name, each in samples.items():
        build, encode, total = (median(kind) / CHAIN * 1e6 for kind in zip(*each, strict=True))
        found[name] = {"build": build, "encode": encode, "host": build + encode, "us": total}
    pairs = zip(samples["ours"], samples["plain"], strict=True)
    found["ours / plain"] = median((a[0] + a[1]) / (b[0] + b[1]) for a, b in pairs)
    return found


def main() -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1x16x8192", help="BATCHxHEADSxCONTEXT")
    parser.add_argument("--plan", default="r16:64", help="TILE:PARTITIONS")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    batch, heads, context = map(int, options.shape.split("x"))
    tile, partitions = options.plan.split(":")
    plan = Plan("split" if int(partitions) > 1 else "single", int(partitions), tile)
    able, reason = backends.get("cuda").available()
    if not able:
        print(f"the CUDA kernels can't run: {reason}")
        return 1
    mx.set_default_device(mx.gpu)
    shape = Shape(context, batch, heads)
    cases = Ring.of(shape, device.probe("cuda").cache_bytes).cases
    forms = {"ours": ours(plan), "plain": plain(plan, shape, cases)}
    print(json.dumps(measured(forms, cases, options.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
