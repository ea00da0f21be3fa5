"""Runs Metal kernels on the CPU, under checkers, for tests on machines without Metal."""

from .compiler import missing, prepare
from .library import Counts, EmulationError, Library, build
from .stand_in import Launch, emulated
from .tokens import SourceError
from .typecheck import type_check

__all__ = [
    "Counts",
    "EmulationError",
    "Launch",
    "Library",
    "SourceError",
    "build",
    "emulated",
    "missing",
    "prepare",
    "type_check",
]
