"""What a kernel of a GPU may do when it is launched, without the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Launch = Callable[..., Any]


def zeros(**launch: Any) -> list[mx.array]:
    """What a launch that never ran leaves behind."""
    shapes, dtypes = launch["output_shapes"], launch["output_dtypes"]
    return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def nans(**launch: Any) -> list[mx.array]:
    return [mx.full(each.shape, mx.nan, each.dtype) for each in zeros(**launch)]


def raising(error: Exception) -> Launch:
    def launch(*given: Any, **options: Any) -> Any:
        raise error

    return launch
