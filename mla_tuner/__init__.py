"""Autotuned split-KV decode for multi-head latent attention (MLA) on MLX."""

from .caches import DenseCache, PagedCache
from .errors import TunerError
from .ops import Run, last_run, mla_decode
from .plan import Decision, Plan
from .shapes import Geometry, Shape

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "DenseCache",
    "Geometry",
    "PagedCache",
    "Plan",
    "Run",
    "Shape",
    "TunerError",
    "last_run",
    "mla_decode",
]
