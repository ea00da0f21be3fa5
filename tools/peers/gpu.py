"""Our CUDA kernels beside FlashMLA, FlashAttention 3's MLA and vLLM's Triton decode: one process.

    python -m tools.peers.unpack wheels/vllm-0.24.0-*.whl peers.zip
    python -m tools.peers.gpu --vllm peers.zip --json peers.json
    python -m tools.peers.gpu --no-peers --plans sweep --variant new=/tmp/shaders

The wheel: `pip download --no-deps --only-binary=:all: --python-version 3.12 --platform
manylinux_2_28_x86_64 vllm==0.24.0`. Needs a GPU, PyTorch as that wheel expects it (2.11, CUDA 13),
NVRTC, and MLX for the CPU: MLX runs nothing here, it only says what it would launch, and exactly
that text is compiled and launched.

All read the same caches: by default bfloat16, pages of 64 tokens at random places, at least 19 of
them and 3 times the L2 cache together. A graph holds one call on each, with all launches of a call.
It is replayed for 25 ms to warm up; the median of 15 replays is a round's time. Rounds are
interleaved; the table has medians over rounds. Every answer is compared with float64 on some rows.
The column FA3-MLA has the faster of two ways: its plan made before, or in every call. `decode` and
`merge` are our two launches, each timed alone.

Exits with 1 if an answer was wrong or something failed, with 2 if asked for what there isn't. A
library that isn't there, or can't do a call, is named and left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from mla_tuner.shapes import DTYPES, Shape

from .bench import Bench, Gpu, GpuLostError, say
from .choices import USUAL_CACHES, label_of, plans_of, shapes_of
from .ours import Kernels, Planned, Variant, planned
from .tables import Row, table
from .theirs import Maker, load
from .unpack import opened

PACKAGES = ("torch", "triton", "mlx", "numpy")
Work = dict[Shape, list[Planned]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--vllm", type=Path, help="vLLM's wheel, or what `tools.peers.unpack` made of it")
    add("--no-peers", action="store_true", help="our kernels only")
    add("--peers", default="", help="NAME,... of the others; default: all")
    add("--shapes", default="", help="BATCHxHEADSxCONTEXT,...; default: ten of them")
    add("--plans", default="best", help="best, sweep, or TILE:PARTITIONS,... as r16:128,r64w:64")
    add("--q-len", type=int, default=1, help="queries of a sequence")
    add("--dtype", choices=DTYPES, default="bfloat16", help="only ours take float32")
    add("--lengths", default="", help="a ragged batch instead, as 131072,2048*15")
    add("--variant", action="append", default=[], help=_VARIANT)
    add("--repeat", type=int, default=3, help="interleaved rounds; default 3")
    add("--caches", type=int, default=USUAL_CACHES, help=_CACHES)
    add("--json", type=Path, help="file for all that was measured, and with what")
    return made


_VARIANT = (
    "kernels to time beside ours, again for more: NAME=FOLDER, a copy of shaders/ with changes, or "
    "NAME=MACRO=VALUE,..., other constants"
)
_CACHES = f"distinct ones; never fewer than 19 or 3 times the L2 cache; default {USUAL_CACHES}"


def recorded(shapes: list[Shape], plans: str, variants: list[Variant], gpu: Gpu) -> Work:
    """What is launched for each shape. Raises ValueError: see `plans_of` and `planned`."""
    return {
        shape: [
            each
            for variant in variants
            for each in planned(variant, shape, plans_of(plans, shape, gpu.capability, gpu.cores))
        ]
        for shape in shapes
    }


def measured(bench: Bench, work: Work, rows: list[Row]) -> None:
    """Adds a row a shape. Raises GpuLostError."""
    torch = import_module("torch")
    for shape, plans in work.items():
        rows.append(row := Row(label_of(shape)))
        try:
            bench.fill(row, shape, plans)
        except torch.OutOfMemoryError as error:
            row.faults.append(f"out of memory: {error}")
            say(f"{row.label} {row.faults[-1]}")
        torch.cuda.empty_cache()


def gpu_here() -> Gpu | None:
    """The first GPU; None without PyTorch or a GPU."""
    try:
        torch = import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.zeros(1, device="cuda")  # makes the device's context, which the driver's calls need
    found = torch.cuda.get_device_properties(0)
    capability = 10 * found.major + found.minor
    return Gpu(found.name, capability, found.multi_processor_count, found.L2_cache_size)


def software() -> dict[str, str]:
    """Versions of what runs."""
    found = {"python": platform.python_version(), "driver": _driver_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split()[0] if done.stdout.split() else "unknown"


def report(rows: list[Row], variants: list[Variant], gpu: Gpu, file: Path | None) -> None:
    """Prints the table, and writes the file if there is one."""
    print(table(rows, [variant.name for variant in variants]), flush=True)
    if file:
        facts: dict[str, Any] = {"gpu": asdict(gpu), "software": software(), "command": sys.argv}
        facts["rows"] = [asdict(row) for row in rows]
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """The exit code; see above."""
    parsed = parser()
    options = parsed.parse_args()
    gpu = gpu_here()
    if gpu is None:
        say("no GPU that PyTorch can use is here")
        return 1
    try:
        shapes = shapes_of(options.shapes, options.q_len, options.dtype, options.lengths)
        variants = [Variant(), *map(Variant.of, options.variant)]
        work = recorded(shapes, options.plans, variants, gpu)
    except ValueError as error:
        parsed.error(str(error))
    if not options.vllm and not options.no_peers:
        parsed.error("--vllm says where the other libraries are; --no-peers goes without them")
    with ExitStack() as stack:
        makers: dict[str, Maker] = {}
        if not options.no_peers:
            try:
                folder = stack.enter_context(opened(options.vllm))
            except (OSError, BadZipFile) as error:
                parsed.error(f"--vllm {options.vllm}: {error}")
            makers, reasons = load(folder)
            for reason in reasons:
                say(reason)
            if options.peers:
                wanted = options.peers.split(",")
                makers = {name: made for name, made in makers.items() if name in wanted}
        return _run(options, gpu, variants, work, makers)


def _run(
    options: argparse.Namespace,
    gpu: Gpu,
    variants: list[Variant],
    work: Work,
    makers: dict[str, Maker],
) -> int:
    kernels, rows, lost = Kernels(gpu.architecture), list[Row](), False
    try:
        kernels.compile(each for plans in work.values() for each in plans)
        measured(Bench(gpu, kernels, makers, options.repeat, options.caches), work, rows)
    except (ValueError, RuntimeError, GpuLostError) as error:  # PyTorch raises RuntimeErrors
        say(f"{type(error).__name__}: {error}")
        lost = True
    report(rows, variants, gpu, options.json)
    return 1 if lost or any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
