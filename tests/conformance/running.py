"""How a case is run, and that the plan asked for is what ran."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
from table import Entry

from mla_tuner import last_run, mla_decode
from mla_tuner.cases import Case
from mla_tuner.plan import Plan


def run(case: Case, plan: Plan) -> tuple[mx.array, mx.array]:
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
    )
    mx.eval(out, lse)
    return out, lse


def rows_of(entry: Entry) -> list[int] | None:
    """All rows, or where the truth would take long a few: the first and last ones among them."""
    rows = entry.heads * entry.q_len
    if rows * sum(entry.lengths) < 1 << 20:
        return None
    return sorted({0, 1, rows // 2, rows // 2 + 1, rows - 2, rows - 1})


def assert_ran(plan: Plan, context: int) -> None:
    found = last_run()
    assert found is not None
    assert found.plan == plan
    assert found.executed is not None
    tile = plan.tile or found.executed.tile
    assert found.executed == replace(plan.cut(context), tile=tile)
