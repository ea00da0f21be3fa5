"""MLA_TUNER in the environment: what an operator wants of serving, whatever its code says."""

from __future__ import annotations

import logging
import os

from .errors import TunerError

MODES = ("off", "log", "force")

log = logging.getLogger("mla_tuner")
_said: set[str] = set()  # values that were warned of: an engine and its policy both ask


def mode() -> str:
    """What MLA_TUNER says, in any case; "" where it says nothing.

    Raises:
        TunerError: it says something else than `MODES`.
    """
    text = os.environ.get("MLA_TUNER", "")
    if text and text.lower() not in MODES:
        raise TunerError(f"MLA_TUNER={text!r} is none of {', '.join(MODES)}")
    return text.lower()


def known_mode() -> str:
    """As `mode`; what it does not know is ignored, with a warning a process: serving goes on."""
    try:
        return mode()
    except TunerError as error:
        if str(error) not in _said:
            _said.add(str(error))
            log.warning("%s: it is ignored", error)
        return ""
