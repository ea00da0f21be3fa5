"""NVRTC, the compiler that MLX calls on the user's machine, out of the wheel `nvidia-cuda-nvrtc`.

It compiles for any GPU, needs none, and tells what ptxas says: registers, stack, spills.
"""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_BUILTINS, _LIBRARY = "libnvrtc-builtins.so.*", "libnvrtc.so.*"


class Compiled(NamedTuple):
    """One kernel's machine code, and the resources of one thread."""

    code: bytes
    registers: int
    spill_bytes: int  # stored or loaded, whatever is more
    log: str


def find() -> Path | None:
    """The library; None where the wheel is not installed."""
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in sorted(folder.glob(f"*/lib/{_LIBRARY}"))]
    return found[-1] if found else None


class Nvrtc:
    """Loads the library; its functions are called without Python's lock, so threads gain."""

    def __init__(self, library: Path) -> None:
        for builtins in library.parent.glob(_BUILTINS):  # found by name, not by folder
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))

    def compile(self, text: str, name: str, architecture: str) -> Compiled:
        """Compiles the kernel `name` for an architecture, e.g. "sm_90a", as MLX 0.32.4 does.

        Raises:
            ValueError: the compiler's own words.
        """
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, 0, 0)
        try:
            self._call("AddNameExpression", program, f"mlx::core::cu::{name}".encode())
            options = (
                b"--device-as-default-execution-space",
                f"--gpu-architecture={architecture}".encode(),
                b"--ptxas-options=-v",
                b"--no-cache",  # what comes out of it has no words of ptxas
            )
            array = (ctypes.c_char_p * len(options))(*options)
            failed = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failed:
                raise ValueError(log)
            return _compiled(self._read("CUBIN", program), log)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvrtc{function}")(*arguments)
        if status:
            raise ValueError(f"nvrtc{function} failed with status {status}")


def _compiled(code: bytes, log: str) -> Compiled:
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    if not registers or not spills:
        raise ValueError(f"ptxas tells no registers:\n{log}")
    return Compiled(code, max(map(int, registers)), max(map(int, spills)), log)
