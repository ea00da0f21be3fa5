"""Methods and functions of an engine that are ours for a while, and how they are given back."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

Owner = type | ModuleType


class Binding(NamedTuple):
    """A method of a class or function of a module that is ours now, and what it replaced."""

    owner: Owner
    name: str
    ours: Any
    stock: Any


class Bindings:
    """What is bound. What others have wrapped since stays, and is known as bound."""

    def __init__(self) -> None:
        self._held: dict[tuple[Owner, str], Binding] = {}

    def __contains__(self, place: tuple[Owner, str]) -> bool:
        """Not where others have put back the very thing that ours replaced."""
        held = self._held.get(place)
        return held is not None and vars(held.owner).get(held.name) is not held.stock

    def stock(self, owner: Owner, name: str) -> Any:
        """What ours replaced; where nothing is bound, what is there."""
        place = owner, name
        return self._held[place].stock if place in self else vars(owner).get(name)

    def bind(self, owner: Owner, name: str, ours: Any) -> None:
        """Put `ours` in the place of the owner's own."""
        self._held[owner, name] = Binding(owner, name, ours, vars(owner)[name])
        setattr(owner, name, ours)

    def release(self) -> None:
        """Give back all that is still ours."""
        for key, (owner, name, ours, stock) in list(self._held.items()):
            if vars(owner).get(name) is ours:
                setattr(owner, name, stock)
                del self._held[key]
