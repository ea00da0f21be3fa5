"""Tables that somebody damaged or forged: refused by file and field, or harmless in serving."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend
from share_tables import H200, KERNEL, SOFTWARE, any_kernel, table

from mla_tuner import backends, family, share
from mla_tuner.backends import cuda_tiles
from mla_tuner.device import Device
from mla_tuner.errors import ShareError, TunerError
from mla_tuner.plan import Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import Shape
from mla_tuner.store import Store

__all__ = ["any_kernel", "table"]  # the fixtures
CUT = replace(H200, cores=66, memory_gb=71)  # of the same family
CONTEXTS = (0, 1024, 4096, 8192, 32768, 1 << 20)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 257, 1 << 31, 1 << 63, 10**400, True, False, None),
    *(1e308, -1e308, 5e-324, 1e-300, 0.0, 1.5, float("nan"), float("inf")),
    *("", "x" * 300, "../../../etc/passwd", "/home/somebody", "C:\\Users\\me", "~root", "a\nb"),
    *(
        "'; DROP TABLE plan; --",
        '" OR 1=1',
        "\0",
        "\ud800",
        "split",
        "mlx",
        "r16t8",
        "r9999",
        "\uff11",
    ),
    *([], {}, [[]], [1] * 5000, {"$ref": "#"}, {"context": 1}),
)
TEXTS = ("\0", "{", "}", "[", "]", '"', ",", "\n", "   ", "1e999", "9" * 5000, "\\u0000", "\ud7ff")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a value of JSON something stands."""
    if at:
        yield at
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for name, each in inside:
        yield from places(each, (*at, name))


def fields_changed(data: Any, rng: random.Random) -> str:
    """Another value, no value, one more field or one twice; still JSON, in the layout."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        *inside, last = rng.choice(list(places(data)))
        there = data
        for name in inside:
            there = there[name]
        kind = rng.randrange(6)
        if kind == 0:
            del there[last]
        elif kind == 1 and isinstance(there, dict):
            there[rng.choice(("note", "__class__", "'; DROP TABLE run; --"))] = 1
        elif kind == 2 and isinstance(there, list):
            there.append(copy.deepcopy(rng.choice(there)))
        else:
            there[last] = copy.deepcopy(rng.choice(VALUES))
    return laid_out(data)


def laid_out(data: Any) -> str:
    """As the export writes it, so that serving gets to see what is wrong inside."""
    text = json.dumps(data)
    for mark, line in (
        ('"buckets": [', '\n  "buckets": ['),
        ('{"context": ', '\n   {"context": '),
        ('"evidence": [', '"evidence": [\n'),
        ('{"run": ', '    {"run": '),
        ('}]}], "thresholds"', '}]}\n  ],\n  "thresholds"'),
        ('}]}, \n   {"context"', '}]},\n   {"context"'),
    ):
        text = text.replace(mark, line)
    return text


def text_changed(text: str, rng: random.Random) -> str:
    """Cut short, or with a few characters that are not as they were."""
    place = rng.randrange(len(text))
    kind = rng.randrange(4)
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + rng.choice(TEXTS) + text[place:]
    if kind == 2:
        return text[:place] + text[place + rng.randrange(1, 200) :]
    return text[:place] + chr(rng.randrange(1, 128)) + text[place + 1 :]


def numbers_changed(text: str, rng: random.Random) -> str:
    """A digit, in a file that keeps its layout: what a person might do by hand."""
    digits = [i for i, each in enumerate(text) if each.isdigit()]
    chars = list(text)
    for place in rng.sample(digits, rng.choice((1, 2, 8))):
        chars[place] = rng.choice("0123456789")
    return "".join(chars)


class Hopper(FakeBackend):
    """The CUDA back end's own rules of what is legal, without a GPU."""

    def refusal(self, plan: Plan, shape: Shape) -> str | None:
        return cuda_tiles.refusal(plan.tile, shape, 90) if plan.native else None


class Victim:
    """Everything that reads a table, for one mutation after the other."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.text = path, path.read_text()
        self.data = json.loads(self.text)
        self.folder = folder
        self.refused = self.served = 0

    def meets(self, text: str, store: Store) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self.path.write_bytes(raw)
        self.is_checked(text, store)
        self.is_served()

    def is_checked(self, text: str, store: Store) -> None:
        found = share.check(self.path)
        assert all("\n" not in line for line in found)
        with suppress(TunerError):  # what is sound but for its layout may be imported
            table = share.load(text, self.path.name)
            share.into_store(table, store)
            assert share.render(share.merged(table, table))
            return
        with pytest.raises(ShareError) as caught:
            share.read(self.path)
        assert str(caught.value).startswith(f"{self.path.name}: ")
        assert "\n" not in str(caught.value)
        assert found
        self.refused += 1

    def is_served(self) -> None:
        """On the very device, and on one that is lent the plans."""
        for device in (H200, CUT):
            self.is_served_on(device)

    def is_served_on(self, device: Device) -> None:
        shared = family.load(device, KERNEL, self.path.with_name("none.db"))
        policy = Policy(device, shared=shared, mlx="0.32.4", system=SOFTWARE["system"])
        backend = backends.get("cuda")
        for context in CONTEXTS:
            for heads in (16, 128):
                found = policy.decide(context, 1, heads, "bfloat16")
                assert type(found.plan) is Plan
                assert found.reason.isprintable()
                policy.explain(context, 1, heads, "bfloat16")
                if found.plan.native:
                    assert backend.refusal(found.plan, Shape(context, 1, heads)) is None
                self.served += found.source != "gates"


@pytest.fixture
def victim(table: Path, monkeypatch: pytest.MonkeyPatch) -> Victim:
    """Of a serving process on that GPU."""
    backend = Hopper(name="cuda", kernel=KERNEL)
    monkeypatch.setattr(backends, "get", lambda name: backend)
    monkeypatch.setattr(family, "FOLDERS", (table.parent,))
    return Victim(table, table.parent)


def fuzz(victim: Victim, tmp_path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    ways: tuple[Callable[[], str], ...] = (
        lambda: fields_changed(victim.data, rng),
        lambda: text_changed(victim.text, rng),
        lambda: numbers_changed(victim.text, rng),
    )
    logging.getLogger("mla_tuner").setLevel(logging.CRITICAL)
    try:
        with Store(tmp_path / "into.db") as store:
            for _ in range(count):
                victim.meets(rng.choice(ways)(), store)
            assert store.check()["ok"]
    finally:
        logging.getLogger("mla_tuner").setLevel(logging.NOTSET)


def test_the_table_itself_is_served(victim: Victim) -> None:
    victim.is_served()
    assert victim.served >= 8
    victim.path.write_text(laid_out(victim.data))
    victim.served = 0
    victim.is_served()
    assert victim.served >= 8  # the layout of mutations is one that serving reads


@pytest.mark.usefixtures("any_kernel")
def test_damaged_tables_are_refused_or_harmless(victim: Victim, tmp_path: Path) -> None:
    fuzz(victim, tmp_path, 150, seed=0)
    assert victim.refused > 75
    assert victim.served > 0


@pytest.mark.slow
@pytest.mark.usefixtures("any_kernel")
@pytest.mark.parametrize("seed", range(1, 5))
def test_ten_thousand_damaged_tables_are(victim: Victim, tmp_path: Path, seed: int) -> None:
    fuzz(victim, tmp_path, 2500, seed)
    print(f"{victim.refused} of 2500 refused")
