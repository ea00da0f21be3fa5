"""Registers of each Metal tile by a stand-in compiler: clang's NVPTX back end, then ptxas.

    python -m tools.msl.registers       needs ziglang (from PyPI, for its clang) and CUDA's ptxas

Apple's compiler does not exist for Linux. This one shows arrays that fall out of registers and
loads that are merged, and prints the table of docs/metal.md. Addresses are 64-bit register pairs
here, so counts run high; nothing of it was seen on an Apple GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mla_tuner.backends.metal_tiles import TILES, Matrix
from mla_tuner.cases import make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import DEEPSEEK, Shape

from .decode import decode
from .translate import CPP, for_type_check
from .typecheck import clang

GPU = "sm_80"
TARGET = ["-target", "nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", GPU, "-O2", "-w"]
FRONT = [
    *("-x", "c++", "-std=c++17", "-ffreestanding", "-nostdinc", "-fno-strict-aliasing"),
    *("-Xclang", "-target-feature", "-Xclang", "+ptx78", "-S", "-emit-llvm"),
]
MOST = 255  # registers a thread may have there
CAPS = range(MOST + 1, 31, -8)


def main() -> int:
    if not shutil.which("ptxas"):
        print("ptxas, of any CUDA 12 or 13, is not on the path", file=sys.stderr)
        return 1
    print("| tile | dtype | live in the loop | free | least without spilling | spilled at 96 |")
    print("|---|---|---|---|---|---|")
    for name, tile in TILES.items():
        for dtype in ("float16", "bfloat16", "float32"):
            if tile.refusal(DEEPSEEK, dtype) is None:
                print(row(name, dtype), flush=True)
    return 0


def row(name: str, dtype: str) -> str:
    """One tile at 512+64, paged, several partitions: the loop that decides."""
    tile = TILES[name]
    live = str(tile.registers(DEEPSEEK, dtype)) if isinstance(tile, Matrix) else "-"
    with tempfile.TemporaryDirectory() as folder:
        ptx = to_ptx(text_of(name, dtype), Path(folder))
        free, _ = registers(ptx, MOST)
        least, spilled = free, registers(ptx, 96)[1]
        for cap in CAPS:
            if cap < free and registers(ptx, cap)[1]:
                break
            least = min(least, cap)
    return f"| `{name}` | {dtype} | {live} | {free} | {least} | {spilled} B |"


def text_of(tile: str, dtype: str) -> str:
    """What MLX would compile for that tile; nothing is run."""
    shape = Shape(300, 1, TILES[tile].rows, dtype)
    return decode(make_case(shape), Plan("split", 3, tile), "dry").launches[0].text


def to_ptx(text: str, folder: Path) -> Path:
    """Compiles a kernel's text; files go into `folder`."""
    headers = folder / "declarations.h"
    headers.write_text(with_bodies((CPP / "declarations.h").read_text()))
    signature = re.search(r"\[\[kernel\]\] void \w+\([^{]*\) \{\n", text)
    if signature is None:
        raise ValueError("[registers] expected a kernel as MLX writes it; got none")
    # As arguments they would be the same for all lanes, and take no registers.
    lanes = "thread_index_in_simdgroup = lane_of_warp();\n"
    lanes += "simdgroup_index_in_threadgroup = warp_of_block();\n"
    code = for_type_check(text[: signature.end()] + lanes + text[signature.end() :])
    ir, ptx = folder / "kernel.ll", folder / "kernel.ptx"
    command = [*clang(), *TARGET, *FRONT, f"-I{folder}", "-o", str(ir), "-"]
    subprocess.run(command, input=code, text=True, check=True)
    kernels = re.sub(
        r"define (?:(?:weak_odr|dso_local|hidden) )*void @",
        "define ptx_kernel void @",
        ir.read_text(),
    )
    ir.write_text(kernels)
    subprocess.run([*clang(), "-x", "ir", *TARGET, "-S", "-o", str(ptx), str(ir)], check=True)
    return ptx


def with_bodies(declarations: str) -> str:
    """The type check's declarations, for a compiler that makes code of them."""
    for old, new in (
        ("const __attribute__((address_space(2)))", "const __attribute__((address_space(4)))"),
        (
            "  vec<T, 2>& thread_elements();",
            "  vec<T, 2> elements;\n  vec<T, 2>& thread_elements();",
        ),
    ):
        if declarations.count(old) != 1:
            raise ValueError(f"[registers] expected {old!r} once in declarations.h")
        declarations = declarations.replace(old, new)
    return declarations + (CPP / "ptx.h").read_text()


def registers(ptx: Path, cap: int) -> tuple[int, int]:
    """Registers a lane, and bytes that it stores elsewhere, with at most `cap` of them."""
    command = ["ptxas", f"-arch={GPU}", "-v", f"--maxrregcount={cap}", str(ptx), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    if used is None or spilled is None:
        raise ValueError(f"[registers] expected ptxas to tell registers and spills; got {said!r}")
    return int(used[1]), int(spilled[1])


if __name__ == "__main__":
    sys.exit(main())
