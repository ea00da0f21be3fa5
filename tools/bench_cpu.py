"""Every number of the CPU kernel and of serving in one process, in shuffled rounds.

    python -m tools.bench_cpu [--section peak,torch,mlx,split,linear,overhead,policy]
                              [--isa NAME] [--pages huge|small] [--json FILE]

Memory is in huge pages where the system allows it (glibc's tunable, set by starting anew): with
small ones a read of the whole cache waits for address translation, whoever reads.

Prints Markdown for docs/performance-cpu.md: what the machine is, each figure with its target, and
the times of every form. Run it from the repository's root, on an idle machine; torch is optional.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from tools.cpu_bench import kernels, process, results, scaling, sections
from tools.cpu_bench.results import Results
from tools.cpu_bench.sections import Options
from tools.peers import torch_cpu

Section = Callable[[Options, Results], None]
SECTIONS: dict[str, Section] = {
    "peak": sections.peak,
    "torch": sections.torch,
    "mlx": sections.mlx,
    "split": sections.split,
    "linear": scaling.linear,
    "overhead": process.overhead,
    "policy": process.policy,
}


def run(names: Sequence[str], options: Options) -> Results:
    """The named sections, in the order of `SECTIONS`."""
    mx.set_default_device(mx.cpu)
    found = Results([], [], [])
    for name, section in SECTIONS.items():
        if name in names:
            start = time.perf_counter()
            section(options, found)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if options.shrink > 1:
        found.notes.append(f"contexts divided by {options.shrink}: a quick look, not evidence")
    return found


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        raise argparse.ArgumentTypeError(f"expected of {', '.join(SECTIONS)}; got {unknown[0]}")
    return names


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", type=_names, default=list(SECTIONS), metavar="A,B")
    parser.add_argument("--seconds", type=float, default=1.0, help="a shape and thread count")
    parser.add_argument("--threads", default="1,2", metavar="1,2")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="divide contexts by N")
    parser.add_argument("--isa", default="", help="keeps the kernel and PyTorch to it")
    parser.add_argument("--pages", choices=("huge", "small"), default="huge", help="of memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    args = parser.parse_args(argv)
    process.use_pages(args.pages)
    threads = tuple(int(n) for n in args.threads.split(","))
    kernels.use_isa(args.isa)
    held = torch_cpu.hold_to(args.isa)
    found = run(args.section, Options(args.seconds, threads, args.shrink))
    if held and "torch" in args.section:
        found.notes.append(f"PyTorch kept to {args.isa} by {held}")
    head = results.header(threads, argv)
    print(results.markdown(head, found), end="")
    if args.json:
        args.json.write_text(json.dumps(results.as_json(head, found), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
