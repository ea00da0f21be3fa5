"""Proves and times the CUDA kernels on the GPU of this machine: `python -m tools.cuda_check`.

First every tile in every dtype, geometry and layout against float64, in several processes, because
compiling takes longer than running. Then the plans of ten shapes, by chains of calls on caches that
together are larger than the L2 cache. Microseconds a call: wall clock, of that building the graph
and encoding it, and where PyTorch is installed what its profiler saw on the GPU.

Exits with 0 if all that ran was right, with 1 if anything was wrong or failed or no kernel can run
here, with 2 if asked for what there isn't.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from math import ceil
from statistics import median
from typing import Any

import mlx.core as mx

from mla_tuner import backends, device
from mla_tuner.backends import cuda_tiles
from mla_tuner.caches import PagedCache
from mla_tuner.candidates import row_groups
from mla_tuner.cases import SCALE, Case, Check, check, make_case
from mla_tuner.ops import mla_decode
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import (
    DEEPSEEK,
    DTYPES,
    GEOMETRIES,
    LAYOUTS,
    MAX_PARTITIONS,
    Geometry,
    Shape,
    pieces,
)
from mla_tuner.verify import run_case

from .peers.choices import BLOCK_SIZE, COLD, SHAPES

COUNTS = (2, 4, 8, 16, 32, 48, 64, 96, 128)
CHAIN = 216  # calls of one evaluation; at least 64 where they are slow
REPEATS = 5
LONGEST_S = 0.4  # of one chain, where 64 calls take no longer

Times = dict[str, float]
_async_eval: Any = mx.async_eval  # MLX's stubs give it no types


# --- right?


Variant = tuple[str, str, Geometry, str]


def variants() -> list[Variant]:
    """Every tile, dtype, geometry and layout that runs here."""
    capability = cuda_tiles.capability(device.probe("cuda").architecture)
    found = []
    for dtype, geometry, layout in product(DTYPES, GEOMETRIES, LAYOUTS):
        shape = Shape(300, 1, 16, dtype, geometry, 1, layout)
        for name in cuda_tiles.TILES:
            if cuda_tiles.refusal(name, shape, capability) is None:
                found.append((name, dtype, geometry, layout))
    return found


def small_cases(dtype: str, geometry: Geometry, layout: str) -> Iterator[Case]:
    """Ragged, empty, causal, padded and strided ones, with poison where nobody may read. The last
    has many rows of few tokens: some of them show what rounding can do at worst.
    """
    dense = layout == "dense"
    for number, (heads, q_len, lengths) in enumerate(
        (
            (20, 2, (65, 0, 1, 300)),
            (5, 8, (64, 3)),
            (128, 1, (1000,)),
            (16, 1, (2049,)),
            (9, 3, (700, 63)),
            (128, 1, (40,) * 8),
        )
    ):
        ragged = lengths if len(set(lengths)) > 1 else ()
        shape = Shape(max(lengths), len(lengths), heads, dtype, geometry, q_len, layout, ragged)
        options: dict[str, Any] = {"block_size": (16, 8, 64, 24, 256, 32)[number]}
        if dense:
            starts = [7 * b + 3 for b in range(len(lengths))] if number % 2 else None
            options = {"strided": number % 2 == 0, "starts": starts}
        logits = 30.0 if number == 3 else 1.0
        yield make_case(shape, seed=number, logit_scale=logits, **options)


def prove(part: str, some: list[Variant]) -> bool:
    """Whether these variants are right; prints the worst failures and how many ran."""
    ran, worst, started = 0, 0.0, time.perf_counter()
    wrong: list[tuple[float, str]] = []
    for name, dtype, geometry, layout in some:
        for case in small_cases(dtype, geometry, layout):
            for plan in (Plan("single", 1, name), Plan("split", 3, name), Plan("split", 16, name)):
                result = run_case(case, plan)
                ran, worst = ran + 1, max(worst, result.max_error)
                if not result.ok:
                    wrong.append((result.max_error, f"WRONG {name} {result.reason}"))
    for _, reason in sorted(wrong, reverse=True)[:10]:
        print(reason)
    seconds = time.perf_counter() - started
    print(f"{part}: {ran} runs, {len(wrong)} wrong, worst {worst:.1e}, {seconds:.0f} s")
    return not wrong


def prove_all(processes: int) -> bool:
    """Runs `prove` in that many processes and prints what they print; whether all is right."""
    commands = [
        [sys.executable, "-m", "tools.cuda_check", "--part", str(part), str(processes)]
        for part in range(processes)
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    right = True
    for each in running:
        output = each.communicate()[0].strip()
        print("\n".join(output.splitlines()[-20:]), flush=True)
        right = right and each.returncode == 0
    return right


# --- fast?


@dataclass(frozen=True)
class Ring:
    """Calls on different caches, so that each finds its own one cold."""

    cases: list[Case]

    @classmethod
    def of(cls, shape: Shape, cache_bytes: int) -> Ring:
        count = max(2, ceil(COLD * cache_bytes / shape.cache_bytes))
        columns = ceil(shape.context / BLOCK_SIZE)
        blocks, width = shape.batch * columns, shape.geometry.width
        dtype = getattr(mx, shape.dtype)

        def normal(*sizes: int) -> mx.array:
            return mx.random.normal(sizes).astype(dtype)

        rows = (shape.batch, shape.heads, shape.q_len)
        q_nope = normal(*rows, shape.geometry.kv_lora_rank)
        q_pe = normal(*rows, shape.geometry.rope_dim)
        cases, lengths = [], shape.all_lengths  # one tuple: so the layers of a step have it
        for _ in range(count):
            table = mx.random.permutation(blocks).astype(mx.int32).reshape(shape.batch, columns)
            cache = PagedCache(normal(blocks, BLOCK_SIZE, width), table, lengths)
            mx.eval(cache.latent, table, q_nope, q_pe)
            cases.append(Case(shape, q_nope, q_pe, cache, SCALE))
        return cls(cases)

    def chain(self, plan: Plan, calls: int) -> tuple[float, float, float]:
        """Seconds of building, encoding and all of it; a call's queries are the last one's answer,
        for a GPU may run calls side by side that don't need each other.
        """
        started = time.perf_counter()
        out = self.cases[0].q_nope
        for i in range(calls):
            case = self.cases[i % len(self.cases)]
            out = mla_decode(out, case.q_pe, case.cache, scale=case.scale, plan=plan)
        built = time.perf_counter()
        _async_eval(out)
        encoded = time.perf_counter()
        mx.synchronize()
        return built - started, encoded - built, time.perf_counter() - started


def timed(ring: Ring, plan: Plan) -> Times:
    """Medians of microseconds a call."""
    mx.synchronize()
    ring.chain(plan, 4)
    slow = ring.chain(plan, 4)[2] / 4
    calls = max(64, min(CHAIN, int(LONGEST_S / slow))) if plan.native else 64
    if slow * 64 > LONGEST_S:
        calls = max(8, int(LONGEST_S / slow))
    ring.chain(plan, calls)
    samples = [ring.chain(plan, calls) for _ in range(REPEATS)]
    build, encode, total = (median(each) / calls * 1e6 for each in zip(*samples, strict=True))
    found = {"us": total, "build": build, "encode": encode, "calls": float(calls)}
    return {key: round(value, 2) for key, value in found.items()}


def seen_on_gpu(ring: Ring, plan: Plan) -> Times:
    """Median microseconds of each of our kernels; empty without PyTorch."""
    try:
        torch: Any = import_module("torch.profiler")
    except ImportError:
        return {}
    with torch.profile(activities=[torch.ProfilerActivity.CUDA]) as profiler:
        ring.chain(plan, CHAIN // 2)
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if "custom_kernel_mla" in event.name:
            kind = "merge" if "merge" in event.name else "decode"
            span = event.time_range
            kernels.setdefault(kind, []).append(span.end - span.start)
    return {kind: round(median(spans), 2) for kind, spans in kernels.items()}


def plans_of(shape: Shape, cores: int) -> Iterator[Plan]:
    """MLX's own, then every useful tile with partition counts up to two blocks a core."""
    yield from (MLX, Plan("mlx_rows"))
    backend = backends.get("cuda")
    for name in backend.tiles(shape):
        tasks = row_groups(shape.rows, name) * shape.batch
        yield Plan("single", 1, name)
        counts = {*COUNTS, cores // tasks, 2 * cores // tasks}
        for count in sorted(n for n in counts if 2 <= n <= MAX_PARTITIONS):
            if pieces(shape.context, count) == count and tasks * count <= 2 * cores:
                yield Plan("split", count, name)


def label_of(shape: Shape) -> str:
    return f"{shape.batch}x{shape.heads}x{shape.context}"


def sweep(shape: Shape, cores: int, cache_bytes: int) -> bool:
    """Prints a line a path or tile and the best plan; whether all ran and that one is right."""
    ring = Ring.of(shape, cache_bytes)
    found: dict[Plan, Times] = {}
    label, failed = label_of(shape), False
    for plan in plans_of(shape, cores):
        try:
            found[plan] = timed(ring, plan)
        except Exception as error:  # one plan that can't run must not end the sweep
            print(label, plan, "FAILED", " ".join(str(error).split())[:300], flush=True)
            failed = True
    for name in dict.fromkeys(plan.tile or plan.path for plan in found):
        times = [
            f"{'P' + str(p.partitions) if p.native else ''}:{t['us']:.1f}"
            for p, t in found.items()
            if (p.tile or p.path) == name
        ]
        print(label, name, *times, flush=True)
    native = {plan: times for plan, times in found.items() if plan.native}
    if not native:
        return False
    best = min(native, key=lambda plan: native[plan]["us"])
    mlx = min(times["us"] for plan, times in found.items() if not plan.native)
    gpu = seen_on_gpu(ring, best)
    del ring
    result = checked(shape, best)
    row = {"shape": label, "plan": str(best), **native[best], "gpu": gpu, "mlx": mlx}
    row |= {"ok": result.ok, "error": float(f"{result.max_error:.2e}"), "reason": result.reason}
    print(json.dumps(row), flush=True)
    return result.ok and not failed


def checked(shape: Shape, plan: Plan) -> Check:
    """Some rows of that shape, against float64."""
    case = make_case(shape, block_size=BLOCK_SIZE)
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
    )
    return check(case, out, lse, plan, [0, shape.rows // 2, shape.rows - 1])


def more_shapes() -> list[Shape]:
    """Beside the table's: several queries, a ragged batch and equal total work, float16."""
    ragged = (131072, *(2048,) * 15)
    return [
        Shape(32768, 1, 16, q_len=4),
        Shape(131072, 16, 16, lengths=ragged),
        Shape(sum(ragged) // 16, 16, 16),
        Shape(32768, 1, 16, "float16"),
        Shape(32768, 1, 8),
        Shape(32768, 1, 32),
        Shape(32768, 1, 64),
    ]


def shapes_of(only: str, more: bool) -> list[Shape]:
    """The table's, and with `more` others; of those the ones whose label starts with `only`."""
    shapes = [Shape(context, batch, heads) for batch, heads, context in SHAPES]
    shapes += more_shapes() if more else []
    return [shape for shape in shapes if label_of(shape).startswith(only)]


def time_all(shapes: list[Shape]) -> bool:
    """Whether all plans ran and the best ones are right."""
    gpu, right = device.probe("cuda"), True
    for shape in shapes:
        print(shape, flush=True)
        right = sweep(shape, gpu.cores or cuda_tiles.USUAL_CORES, gpu.cache_bytes) and right
        mx.clear_cache()
    return right


def main() -> int:
    """The exit code; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument("--no-times", action="store_true", help="check only")
    parser.add_argument("--more", action="store_true", help="also time q_len 4, ragged, float16")
    parser.add_argument("--only", default="", help="shapes whose BATCHxHEADSxCONTEXT starts so")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--tiles", help="check TILE,... in the usual geometry, in this process")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = shapes_of(options.only, options.more)
    if not shapes:
        parser.error(f"no shape starts with {options.only}")
    able, reason = backends.get("cuda").available()
    if not able:
        print(f"the CUDA kernels can't run: {reason}")
        return 1
    mx.set_default_device(mx.gpu)
    if options.tiles:
        tiles = options.tiles.split(",")
        some = [each for each in variants() if each[0] in tiles and each[2] == DEEPSEEK]
        return 0 if prove(options.tiles, some) else 1
    if options.part:
        part, parts = options.part
        return 0 if prove(f"part {part}", variants()[part::parts]) else 1
    right = True
    if not options.no_check:
        right = prove_all(options.processes)
        print("all right" if right else "SOMETHING IS WRONG", flush=True)
    if not options.no_times:
        right = time_all(shapes) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
