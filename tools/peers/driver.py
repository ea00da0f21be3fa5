"""Machine code on the GPU through NVIDIA's driver, on PyTorch's streams: `libcuda` by ctypes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ASKED_FROM = 48000  # bytes of shared memory, as MLX does it
NUMBERS = 10  # that MLX's Shape and Strides hold
_STRUCTS: dict[str, Any] = {
    "shape": ctypes.c_int32 * NUMBERS,
    "strides": ctypes.c_int64 * NUMBERS,
}


class Driver:
    """The driver's functions; PyTorch must have made the device's context before."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def function(self, code: bytes, name: str, shared_bytes: int) -> Function:
        """The kernel `name` of namespace mlx::core::cu in a cubin.

        Raises:
            ValueError: it isn't there, or the driver's word.
        """
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        mangled = mangled_name(code, name)
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(handle), module, mangled)
        if shared_bytes > _ASKED_FROM:
            self.call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED, shared_bytes)
        return Function(self, handle, shared_bytes)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(said))
            raise ValueError(f"{name}: {(said.value or b'error').decode()} ({status})")


class Function:
    """A kernel that is ready to be launched."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p, shared_bytes: int) -> None:
        self._driver, self._handle, self._shared_bytes = driver, handle, shared_bytes

    def launch(
        self,
        blocks: tuple[int, int, int],
        threads: tuple[int, int, int],
        arguments: Arguments,
        stream: int,
    ) -> None:
        """Puts it on a stream, by its number in PyTorch (`stream.cuda_stream`)."""
        self._driver.call(
            "cuLaunchKernel",
            self._handle,
            *map(ctypes.c_uint, (*blocks, *threads, self._shared_bytes)),
            ctypes.c_void_p(stream),
            arguments.pointers,
            None,
        )


class Arguments:
    """Values of a kernel's parameters, kept alive, and pointers to them."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self.values))


def packed(kind: str, numbers: Sequence[int]) -> Any:
    """A parameter's value for ctypes. kind: "pointer" (one number, an address), "shape", "strides"
    or "ndim".

    Raises:
        ValueError: MLX has no room for so many dimensions.
    """
    if kind == "pointer":
        return ctypes.c_uint64(numbers[0])
    if kind == "ndim":
        return ctypes.c_int32(len(numbers))
    if len(numbers) > NUMBERS:
        raise ValueError(f"MLX passes up to {NUMBERS} dimensions; got {len(numbers)}")
    return _STRUCTS[kind](*numbers)


def mangled_name(code: bytes, name: str) -> bytes:
    """What the compiler calls the kernel: sections of a cubin bear its name.

    Raises:
        ValueError: no section does.
    """
    pattern = rb"\.text\.(_ZN3mlx4core2cu%d%sE[^\0]*)\0" % (len(name), re.escape(name.encode()))
    found = re.search(pattern, code)
    if found is None:
        raise ValueError(f"the compiler's result holds no kernel {name}")
    return found[1]
