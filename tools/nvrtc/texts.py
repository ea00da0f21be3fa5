"""What stands in for `mx.fast.cuda_kernel`: keeps the text that MLX would compile, runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint16: "unsigned short",
    mx.uint64: "unsigned long",
}
# Instead of MLX's own prefix, which needs CUDA's headers: only what our texts use of it.
_PREFIX = """
struct __nv_bfloat16 { unsigned short bits; };
struct __half { unsigned short bits; };
typedef int int32_t;
typedef long int64_t;
namespace mlx::core::cu {
template <typename T> struct Numbers {
  T numbers[10];
  const T& operator[](int i) const { return numbers[i]; }
};
typedef Numbers<int32_t> Shape;
typedef Numbers<int64_t> Strides;
}
"""


class Kernel(NamedTuple):
    """One launch: the whole text, and how it is launched."""

    name: str  # of the function in namespace mlx::core::cu
    text: str
    grid: tuple[int, int, int]  # threads
    threadgroup: tuple[int, int, int]
    shared_memory: int
    inputs: tuple[str, ...]


@contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """While it is open every launch of a CUDA kernel is kept here, and gives zeros."""
    kernels: list[Kernel] = []

    def cuda_kernel(**made: Any) -> Callable[..., list[mx.array]]:
        def launch(**given: Any) -> list[mx.array]:
            kernels.append(_kernel(made, given))
            pairs = zip(given["output_shapes"], given["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return launch

    fast: Any = mx.fast
    before = fast.cuda_kernel
    fast.cuda_kernel = cuda_kernel
    try:
        yield kernels
    finally:
        fast.cuda_kernel = before


def _kernel(made: dict[str, Any], given: dict[str, Any]) -> Kernel:
    function, body = f"custom_kernel_{made['name']}", made["source"]
    parameters = _parameters(made["input_names"], given["inputs"], body)
    outputs = zip(made["output_names"], given["output_dtypes"], strict=True)
    parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in outputs]
    text = (
        f"{_PREFIX}{made['header']}namespace mlx::core::cu {{\n"
        f"__global__ void {function}({', '.join(parameters)}) {{\n{body}\n}}\n}}\n"
    )
    return Kernel(
        function,
        text,
        given["grid"],
        given["threadgroup"],
        made["shared_memory"],
        tuple(made["input_names"]),
    )


def _parameters(names: Sequence[str], arrays: Sequence[mx.array], body: str) -> list[str]:
    """As MLX does it: shapes and strides are passed where the body names them."""
    found = []
    for name, array in zip(names, arrays, strict=True):
        found.append(f"const {_TYPES[array.dtype]}* {name}")
        if array.ndim:
            kinds = (("shape", "Shape"), ("strides", "Strides"))
            found += [
                f"const __grid_constant__ {kind} {name}_{suffix}"
                for suffix, kind in kinds
                if f"{name}_{suffix}" in body
            ]
    return found
