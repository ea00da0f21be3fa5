"""Autotuned split-KV decode for multi-head latent attention (MLA) on MLX."""

from .caches import DenseCache, PagedCache
from .errors import TunerError
from .ops import Run, last_run, mla_decode
from .plan import Decision, Plan
from .shapes import Geometry, Shape

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`mla_tuner.policy` at first use: it brings sqlite3 and the device probe."""
    if name != "policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(".policy", __name__)


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
