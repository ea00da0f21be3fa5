"""Compiles kernels and the runtime with g++, once a text; results stay under build/msl."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from .tokens import SourceError
from .translate import CPP, for_emulator

# Safe to share between processes, and safe to delete.
BUILD = Path(os.environ.get("MSL_BUILD", Path(__file__).resolve().parents[2] / "build" / "msl"))
MODES = ("fast", "check")
RUNTIME = {
    "fast": ("fibers.cpp", "faults.cpp", "launch.cpp"),
    "check": ("fibers.cpp", "faults.cpp", "launch.cpp", "checker.cpp"),
}
HEADERS = ("library.h", "runtime.h", "types.h", "worker.h", "checker.h")
INSTRUCTIONS = ("avx2", "f16c", "fma")  # of x86-64-v3: the same rounding on every machine
FLAGS = [
    *("-std=c++20", "-march=x86-64-v3", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-fno-exceptions", "-fno-strict-aliasing", "-Wno-attributes"),
    "-Wno-unknown-pragmas",
    # Metal has no double: 1.0 is a float. Where it fuses a * b + c is up to Apple: never, here.
    *("-fsingle-precision-constant", "-ffp-contract=off"),
    "-fexcess-precision=16",  # a half is rounded after each operation, also inside an expression
]
KERNEL_FLAGS = {
    "fast": ["-O1", "-g1", "-gdwarf-4"],
    "check": [
        # -O1: a higher level removes accesses that the checker should see.
        *("-O1", "-g1", "-gdwarf-4", "-DMSL_CHECK", "-ftrivial-auto-var-init=pattern"),
        *("-fsanitize=thread,undefined,bounds-strict", "-fsanitize-undefined-trap-on-error"),
        # What the shadow memory sees anyway, and what doubles the time that a build takes.
        "-fno-sanitize=null,pointer-overflow",
        "--param=tsan-instrument-func-entry-exit=0",
    ],
}
RUNTIME_FLAGS = {"fast": ["-O3"], "check": ["-O3", "-DMSL_CHECK"]}
LINK_FLAGS = {
    "fast": [],
    "check": [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")],
}


@cache
def missing() -> str:
    """Why kernels can't run on this machine; "" where they can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the Metal emulator needs Linux on x86-64"
    flags = Path("/proc/cpuinfo").read_text().split()
    lacking = [name for name in INSTRUCTIONS if name not in flags]
    if lacking:
        return f"the Metal emulator needs a processor with {', '.join(lacking)}"
    if not shutil.which("g++"):
        return "the Metal emulator needs g++ (12 or later); none is on the path"
    if int(version().split(".")[0]) < 12:
        return f"the Metal emulator needs g++ 12 or later; this is {version()}"
    return ""


@cache
def version() -> str:
    command = ["g++", "-dumpfullversion"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_library(code: str, mode: str) -> Path:
    """The library of a translated kernel; SourceError with g++'s words if it does not compile."""
    if reason := missing():
        raise RuntimeError(f"[msl] {reason}")
    objects = [_kernel(code, mode), *_runtime(mode)]
    # -z defs: an unknown sanitizer call (of an atomic, say) must fail here, not at run time.
    words = ["-shared", "-pthread", "-Wl,-z,defs", *LINK_FLAGS[mode], *map(str, objects)]
    return _run(words, ".so")


def _runtime(mode: str) -> list[Path]:
    return [
        _compile(f'#line 1 "{CPP / name}"\n{(CPP / name).read_text()}', RUNTIME_FLAGS[mode])
        for name in RUNTIME[mode]
    ]


def _kernel(code: str, mode: str) -> Path:
    """The object of a kernel. Its header, compiled once, saves half of the time."""
    header = _compile('#include "library.h"\n', KERNEL_FLAGS[mode], "c++-header", "/library.h.gch")
    return _compile(code, [f"-I{header.parent}", *KERNEL_FLAGS[mode]])


def _compile(code: str, flags: list[str], language: str = "c++", suffix: str = ".o") -> Path:
    return _run([*flags, *FLAGS, f"-I{CPP}", "-x", language, "-c"], suffix, code)


@cache
def _headers() -> str:
    return "".join((CPP / name).read_text() for name in HEADERS)


def _run(words: list[str], suffix: str, code: str = "") -> Path:
    """What g++ makes with these words (of `code`), from an earlier run if there was one."""
    known = "\0".join([version(), _headers(), *words, code])
    path = BUILD / f"{hashlib.sha256(known.encode()).hexdigest()[:24]}{suffix}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever finishes last puts the same file there again: no lock is needed.
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        source, output = Path(folder) / "source", Path(folder) / path.name
        source.write_text(code)
        command = ["g++", *words, *([str(source)] if code else []), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SourceError(done.stderr)
        output.replace(path)
    return path


def prepare(texts: Iterable[str], mode: str) -> None:
    """Builds the kernels of `texts` on all cores, for runs to come; raises the first error."""

    def make(text: str) -> None:
        shared_library(for_emulator(text).code, mode)

    distinct = list(dict.fromkeys(texts))
    for text in distinct[:1]:
        make(text)  # with the runtime, which the others then find
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(make, distinct[1:]))
