"""The CUDA kernels' texts as MLX puts them together, and NVRTC to compile them without a GPU."""

from .compiler import Compiled, Nvrtc, find
from .texts import Kernel, recorded

__all__ = ["Compiled", "Kernel", "Nvrtc", "find", "recorded"]
