"""Compiles csrc/ for arm64 macOS 15 on Linux and links it with the libmlx.dylib of MLX's wheel.

    make check-macos            # or: python3 -m tools.macos.check

The compiler is zig, from PyPI. The first run downloads about 140 MB into build/macos. Prints OK,
or the symbols that no library has, and exits with 1. Only code that the module can reach is
checked, and nothing is run: shaders, dispatch sizes, numerics and loading stay unproven.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .macho import imports
from .tbd import write_tbds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "macos"
PYTHON = WORK / "venv" / "bin" / "python"
ZIG_VERSION = "0.15.2"
ZIG = [str(PYTHON), "-m", "ziglang", "c++", "-target", "aarch64-macos.15.0"]
FLAGS = [
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
    *("-Wall", "-Werror=return-type", "-D_METAL_", "-DNB_DOMAIN=mlx"),
]


def main() -> int:
    mlx, nanobind = pinned("mlx"), pinned("nanobind")
    prepare(mlx, nanobind)
    out = WORK / "out"
    out.mkdir(exist_ok=True)
    extension = out / "_native.darwin-arm64.so"
    objects = compile_all(sources(ROOT / "csrc"), out)
    if not objects or not link(objects, out, extension):
        return 1
    return report(extension)


def pinned(package: str) -> str:
    """The exact release that pyproject.toml builds against."""
    found = re.search(rf'"{package}==([^";]+)', (ROOT / "pyproject.toml").read_text())
    if not found:
        raise ValueError(f"[check-macos] expected an exact pin of {package} in pyproject.toml")
    return found.group(1)


def sources(folder: Path) -> list[Path]:
    """What CMakeLists.txt takes: every source; those for other processors compile to nothing."""
    return sorted(folder.glob("*.cpp"))


def kernel_flags() -> list[str]:
    """What CMakeLists.txt adds for csrc/kernel_*.cpp on every processor."""
    found = re.search(r"^set\(maths (.+)\)", (ROOT / "CMakeLists.txt").read_text(), re.M)
    if not found:
        raise ValueError("[check-macos] expected set(maths ...) in CMakeLists.txt")
    return found.group(1).split()


def prepare(mlx: str, nanobind: str) -> None:
    """Zig, nanobind and the unpacked macOS wheel in build/macos; does nothing the second time."""
    stamp = WORK / f"ready-{mlx}-{nanobind}-{ZIG_VERSION}"
    if stamp.exists():
        return
    shutil.rmtree(WORK, ignore_errors=True)
    venv.create(WORK / "venv", with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", f"ziglang=={ZIG_VERSION}", f"nanobind=={nanobind}"], check=True
    )
    where = ["--platform", "macosx_15_0_arm64", "--only-binary=:all:", "--no-deps", "-d", str(WORK)]
    subprocess.run([*pip, "download", *where, f"mlx-metal=={mlx}"], check=True)
    (wheel,) = WORK.glob("mlx_metal-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # The compiled shaders are most of the wheel, and no linker reads them.
        archive.extractall(WORK, [n for n in archive.namelist() if not n.endswith(".metallib")])
    wheel.unlink()
    stamp.touch()


def nanobind_folder() -> Path:
    (folder,) = (WORK / "venv" / "lib").glob("python3*/site-packages/nanobind")
    return folder


def compile_all(files: list[Path], out: Path) -> list[Path]:
    """Object files of `files` and nanobind, or none if any fails (the compiler has said why)."""
    mlx, nanobind = WORK / "mlx", nanobind_folder()
    files = [*files, nanobind / "src" / "nb_combined.cpp"]
    system = [
        HERE / "stubs",
        mlx / "include",
        mlx / "include" / "metal_cpp",
        # This machine's pyconfig.h: right about sizes, so good for a check, not for shipping.
        Path(sysconfig.get_paths()["include"]),
        nanobind / "include",
        nanobind / "ext" / "robin_map" / "include",
    ]
    flags = [*FLAGS, *(part for folder in system for part in ("-isystem", str(folder)))]
    maths = kernel_flags()

    def compile_one(source: Path) -> Path | None:
        target = out / f"{source.stem}.o"
        extra = maths if source.name.startswith("kernel_") else []
        command = [*ZIG, *flags, *extra, "-c", str(source), "-o", str(target)]
        return target if subprocess.run(command).returncode == 0 else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [o for o in pool.map(compile_one, files) if o]
    return objects if len(objects) == len(files) else []


def link(objects: list[Path], out: Path, extension: Path) -> bool:
    libmlx = WORK / "mlx" / "lib" / "libmlx.dylib"
    command = [
        *ZIG,
        "-nostdlib++",  # take the system's libc++ by its stub; zig would build and embed its own
        "-dynamiclib",
        *("-o", str(extension)),
        *map(str, objects),
        str(libmlx),
        *map(str, write_tbds(libmlx, out)),
        "-Wl,-rpath,@loader_path/../mlx/lib",
        "-Wl,-undefined,dynamic_lookup",  # for CPython's symbols; report() refuses any other
    ]
    return subprocess.run(command).returncode == 0


def report(extension: Path) -> int:
    found = imports(extension)
    unresolved = [
        i.symbol for i in found if not i.library and not i.symbol.startswith(("_Py", "__Py"))
    ]
    if unresolved:
        print("UNRESOLVED:", *map(demangle, unresolved), sep="\n  ")
        return 1
    from_mlx = sum(i.library.endswith("/libmlx.dylib") for i in found)
    print(f"OK {extension.name}: {from_mlx} symbols from libmlx.dylib, none unresolved")
    return 0


def demangle(symbol: str) -> str:
    if not shutil.which("c++filt"):
        return symbol
    done = subprocess.run(["c++filt", "-_", symbol], capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
