"""Failures that a person can act on: the CLI prints them as one line and exits with 1."""

from __future__ import annotations

import re


def plain(text: object) -> str:
    """For people: a check says "[Shape] expected ..." to callers in Python, who may not know which
    of their calls it was.
    """
    return re.sub(r"\[[A-Za-z_]+\] (?=expected )", "", str(text))


class TunerError(Exception):
    """Base of every known failure; its text is one line that says what to do."""

    def __str__(self) -> str:
        return plain(super().__str__())


class DeviceError(TunerError):
    """The wanted device is not there, or cannot be measured."""


class ModelError(TunerError):
    """A model name is unknown, or its config.json cannot be read."""


class StoreError(TunerError):
    """The tuning database cannot be opened, read or written."""


class ShareError(TunerError):
    """A shared table cannot be written, or must not be."""


class FleetError(TunerError):
    """The storage of a fleet cannot be used, or belongs to other machines than this one."""


class BusyError(TunerError):
    """Another process is tuning on this machine, or its state makes timings worthless."""


class BudgetError(TunerError):
    """The time budget is too small to finish a single bucket."""
