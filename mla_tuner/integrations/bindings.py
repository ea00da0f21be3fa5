"""Methods of an engine's classes that are ours for a while, and how they are given back."""

from __future__ import annotations

from typing import Any, NamedTuple


class Binding(NamedTuple):
    """A class's method that is ours now, and the one that it replaced."""

    owner: type
    name: str
    ours: Any
    stock: Any


class Bindings:
    """What is bound. A method that others have wrapped since stays, and is known as bound."""

    def __init__(self) -> None:
        self._held: dict[tuple[type, str], Binding] = {}

    def __contains__(self, method: tuple[type, str]) -> bool:
        """Not where others have put back the very method that ours replaced."""
        held = self._held.get(method)
        return held is not None and vars(held.owner).get(held.name) is not held.stock

    def bind(self, owner: type, name: str, ours: Any) -> None:
        """Put `ours` in the place of a class's own method."""
        self._held[owner, name] = Binding(owner, name, ours, vars(owner)[name])
        setattr(owner, name, ours)

    def release(self) -> None:
        """Give back every method that is still ours."""
        for key, (owner, name, ours, stock) in list(self._held.items()):
            if vars(owner).get(name) is ours:
                setattr(owner, name, stock)
                del self._held[key]
