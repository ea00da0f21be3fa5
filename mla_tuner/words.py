"""Numbers with the nouns that they count."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 bucket`, `2 buckets`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
