"""The shipped Metal texts on the table that every back end must pass, run by the emulator.

Small cases run under its checkers: races, bounds, unset memory, divergence. Large ones run without;
`make test-metal-full` checks more of them, in two orders of threads. No Apple GPU is involved.
"""

from __future__ import annotations

from unittest.mock import patch

import mlx.core as mx
import pytest
from running import rows_of
from table import TABLE, Entry

from mla_tuner.backends.metal import MetalBackend
from mla_tuner.backends.metal_tiles import TILES, useful
from mla_tuner.cases import check
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools import msl
from tools.msl.decode import decode

pytestmark = [
    pytest.mark.usefixtures("compiler", "texts"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

CASES = [pytest.param(seed, entry, id=str(entry)) for seed, entry in enumerate(TABLE)]
CHECKED = 30_000  # rows x tokens; the checked mode takes about 20 times as long as the fast one
CHECKED_IN_FULL = 400_000


@pytest.fixture(scope="module")
def texts() -> None:
    """Compiles all kernels of this file first, on all cores."""
    wanted: dict[str, set[str]] = {"fast": set(), "check": set()}
    for seed, entry in enumerate(TABLE):
        done = decode(entry.case(seed), plan_of(entry), "dry")
        wanted[mode_of(entry)] |= {launch.text for launch in done.launches}
    for mode, found in wanted.items():
        msl.prepare(found, mode)


def plan_of(entry: Entry) -> Plan:
    return entry.plan(useful(entry.shape))


def work(entry: Entry) -> int:
    return entry.heads * entry.q_len * sum(entry.lengths)


def mode_of(entry: Entry) -> str:
    return "check" if work(entry) <= CHECKED else "fast"


def assert_right(seed: int, entry: Entry, mode: str, shuffle: int | None = None) -> None:
    case, plan = entry.case(seed), plan_of(entry)
    done = decode(case, plan, mode, shuffle=shuffle)
    kernels = [f"mla_{TILES[plan.tile].kernel}"]
    if plan.cut(entry.shape.context).path == "split":
        kernels.append("mla_reduce")
    assert [launch.name for launch in done.launches] == kernels
    result = check(case, done.out, done.lse, plan, rows_of(entry))
    assert result.ok, result.reason


@pytest.mark.parametrize(("seed", "entry"), CASES)
def test_case(seed: int, entry: Entry) -> None:
    assert_right(seed, entry, mode_of(entry))


@pytest.mark.parametrize("layout", ["paged", "dense"])
@pytest.mark.parametrize("tile", ["v4t8", "r16t16"])
def test_a_tile_proves_itself(tile: str, layout: str) -> None:
    """The proof that each tile must give on a Mac before it runs, given here."""
    with msl.emulated() as launches, patch.object(mx.metal, "is_available", lambda: True):
        backend, shape = MetalBackend(), Shape(300, 1, 16, "float16", layout=layout)
        for plan in (Plan("single", 1, tile), Plan("split", 3, tile)):
            assert backend.refusal(plan, shape) is None
    kernel = f"mla_{TILES[tile].kernel}"
    lanes = ["mla_lanes"] if tile.startswith("r") else []
    split = [kernel, "mla_reduce"]
    assert [launch.name for launch in launches] == [*lanes, kernel, kernel, *split, *split]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize(("seed", "entry"), CASES)
def test_case_in_full(seed: int, entry: Entry, shuffle: int | None) -> None:
    if work(entry) > CHECKED_IN_FULL:
        pytest.skip(f"more than {CHECKED_IN_FULL} rows x tokens take minutes under the checkers")
    assert_right(seed, entry, "check", shuffle)
