"""The shipped Metal texts on the table that every back end must pass, run by the emulator.

Small cases run under its checkers: races, bounds, unset memory, divergence. Large ones run without;
`make test-metal-full` checks more of them, in two orders of threads. No Apple GPU is involved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
import pytest
from running import assert_ran, rows_of, run
from table import TABLE, Entry

from mla_tuner import ops
from mla_tuner.backends.metal import MetalBackend
from mla_tuner.backends.metal_tiles import TILES
from mla_tuner.cases import Case, check
from mla_tuner.plan import Plan
from tools import msl

CASES = [pytest.param(seed, entry, id=str(entry)) for seed, entry in enumerate(TABLE)]
CHECKED = 30_000  # rows x tokens; the checked mode takes about 20 times as long as the fast one
CHECKED_IN_FULL = 400_000


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """Compiles all kernels of this file first, on all cores."""
    if reason := msl.missing():
        pytest.skip(reason)
    for mode in ("fast", "check"):
        with metal("dry") as (backend, launches):
            for seed, entry in enumerate(TABLE):
                if mode_of(entry) == mode:
                    decode(seed, entry, backend)
        msl.prepare({launch.text for launch in launches}, mode)


@contextmanager
def metal(mode: str, shuffle: int | None = None) -> Iterator[tuple[MetalBackend, list[msl.Launch]]]:
    """Within it `mla_decode` runs on an emulated Apple GPU, whose tiles need no proof."""
    with (
        msl.emulated(mode, shuffle) as launches,
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(MetalBackend, "_tried", lambda *_: None),
    ):
        backend = MetalBackend()
        with patch.object(ops, "_backend", lambda: backend):
            yield backend, launches


def work(entry: Entry) -> int:
    return entry.heads * entry.q_len * sum(entry.lengths)


def mode_of(entry: Entry) -> str:
    return "check" if work(entry) <= CHECKED else "fast"


def decode(seed: int, entry: Entry, backend: MetalBackend) -> tuple[Case, Plan, mx.array, mx.array]:
    """Through the product's front door."""
    case, plan = entry.case(seed), entry.plan(backend.tiles(entry.shape))
    return case, plan, *run(case, plan)


def assert_right(seed: int, entry: Entry, mode: str, shuffle: int | None = None) -> None:
    with metal(mode, shuffle) as (backend, launches):
        case, plan, out, lse = decode(seed, entry, backend)
        assert_ran(plan, entry.shape.context)
    kernels = [f"mla_{TILES[plan.tile].kernel}"]
    if plan.cut(entry.shape.context).path == "split":
        kernels.append("mla_reduce")
    assert [launch.name for launch in launches] == kernels
    result = check(case, out, lse, plan, rows_of(entry))
    assert result.ok, result.reason


@pytest.mark.parametrize(("seed", "entry"), CASES)
def test_case(seed: int, entry: Entry) -> None:
    assert_right(seed, entry, mode_of(entry))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize(("seed", "entry"), CASES)
def test_case_in_full(seed: int, entry: Entry, shuffle: int | None) -> None:
    if work(entry) > CHECKED_IN_FULL:
        pytest.skip(f"more than {CHECKED_IN_FULL} rows x tokens take minutes under the checkers")
    assert_right(seed, entry, "check", shuffle)
