"""`_native`, the part in C++: the CPU kernel, and what launches GPU kernels with less work."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from struct import unpack_from
from typing import Any, NamedTuple

import mlx.core as mx

_CURE = "run `make setup`, or reinstall mla-tuner where a C++ compiler and that MLX are found"


class Native(NamedTuple):
    """The native module with its digest, or None and one sentence that says why."""

    native: Any
    digest: str = ""
    reason: str = ""


def load(prepare: Callable[[Any], object]) -> Native:
    """`_native`, or the reason why not, which names the release it needs and the cure.

    prepare: called with the module before it counts as whole.
    """
    installed = str(vars(mx)["__version__"])  # missing in MLX's type stubs
    built = ""
    try:
        info = _module("_build_info")
        digest, built = str(info.KERNEL_DIGEST), str(info.MLX_VERSION)
        # Before the load: a binary for another MLX may crash instead of failing to link.
        if built == installed:
            _check_whole("_native")
            native = _module("_native")
            native.check_runtime()
            prepare(native)
            return Native(native, digest)
        reason = f"the CPU kernel was built for MLX {built}, but this is {installed}"
    except Exception as error:  # a half-made build breaks in any way, and serving goes on
        told = f"{type(error).__name__}: {error}"
        if built:
            reason = (
                f"the CPU kernel, built for MLX {built}, does not load with {installed} ({told})"
            )
        else:
            told = "" if isinstance(error, ModuleNotFoundError) else f"; {told}"
            reason = f"the CPU kernel is not built (for MLX {installed}{told})"
    return Native(None, reason=f"{' '.join(reason.split())}: {_CURE}")


def _check_whole(name: str) -> None:
    """Refuses a binary that was cut short: touching what is missing would end the process.

    The table of sections lies at the end of an ELF file. Other systems' loaders look by themselves.
    """
    spec = find_spec(_full(name))
    if spec is None or spec.origin is None:
        return
    with open(spec.origin, "rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if header[:5] == b"\x7fELF\x02":
        (start,), (width, count) = unpack_from("<Q", header, 40), unpack_from("<HH", header, 58)
        if size < start + width * count:
            raise ImportError(f"{spec.origin} is cut short")


def _module(name: str) -> Any:
    """A module that the build makes: absent from the source tree, so imported by name."""
    return import_module(_full(name))


def _full(name: str) -> str:
    return f"{__package__.rpartition('.')[0]}.{name}"
