"""What the commands answer, as plain JSON values; `report` makes text of the same values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .device import Device
from .plan import Decision, Plan
from .shapes import DEEPSEEK, Bucket, Shape
from .table import Row

if TYPE_CHECKING:
    from .policy import Step
    from .recheck import PlanCheck
    from .tuner import Summary
    from .verify import KernelCheck

Answer = dict[str, object]
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def plan_answer(decision: Decision, device: Device, steps: Iterable[Step] | None = None) -> Answer:
    """`mla-tune plan`: the decision, with the device it holds for; with --explain, all steps."""
    answer = {
        **asdict(decision.plan),
        "source": decision.source,
        "reason": decision.reason,
        "expected_us": decision.expected_us,
        "speedup": decision.speedup,
        "speedup_low": decision.speedup_low,
        "speedup_high": decision.speedup_high,
        "baseline": decision.baseline,
        "device": device.key,
    }
    return answer if steps is None else {**answer, "steps": [asdict(step) for step in steps]}


def tune_answer(
    summary: Summary, rows: Sequence[Row], device: Device, db: object, again: str
) -> Answer:
    """`mla-tune`: `rows` are the wanted buckets' winners, `again` the command that goes on."""
    new = {row.bucket for row in summary.tuned}
    return {
        "device": device.key,
        "db": str(db),
        "seconds": round(summary.seconds, 1),
        "tuned": len(summary.tuned),
        "already_tuned": len(summary.skipped_known),
        "dropped_rounds": summary.dropped,
        "paused_s": round(summary.paused_s, 2),
        "compiled": [{"kernel": name, "seconds": round(s, 2)} for name, s in summary.compiled],
        "plans": [{**row_answer(row), "new": row.bucket in new} for row in rows],
        "not_reached": _reasons(summary.not_reached),
        "failed": _reasons(summary.failed),
        "continue": again if summary.not_reached else None,
    }


def row_answer(row: Row) -> Answer:
    """A stored winner."""
    return {
        "bucket": short(row.bucket),
        **row.bucket._asdict(),
        **asdict(row.plan),
        "expected_us": row.median_us,
        "speedup": row.speedup,
        "speedup_low": row.speedup_low,
        "speedup_high": row.speedup_high,
        "baseline": row.baseline,
        "day": row.day,
    }


def verify_answer(
    device: Device, kernels: Sequence[KernelCheck], plans: Sequence[PlanCheck], left: int
) -> Answer:
    """`mla-tune verify`: `ok` is False where a result is wrong or a plan is slower than `mlx`, as
    far as that is believed.
    """
    bad = [check for check in plans if check.believed and check.result in ("wrong", "slower")]
    return {
        "device": device.key,
        "ok": all(check.ok for check in kernels) and not bad,
        "kernels": [asdict(check) for check in kernels],
        "plans": [_plan_check(check) for check in plans],
        "not_timed": left,
    }


def _plan_check(check: PlanCheck) -> Answer:
    now = check.measurement
    then = f"{check.now.plan} counts from now on" if check.now else check.note
    return {
        "bucket": short(check.row.bucket),
        **check.row.bucket._asdict(),
        **asdict(check.row.plan),
        "stored_speedup": check.row.speedup,
        "speedup": now and now.ratio,
        "speedup_low": now and now.ratio_low,
        "speedup_high": now and now.ratio_high,
        "result": check.result,
        "reason": "; ".join(text for text in (now.message if now else "not timed", then) if text),
        "now": check.now and str(check.now.plan),
    }


def _reasons(buckets: Iterable[tuple[Bucket, str]]) -> list[Answer]:
    return [{"bucket": short(bucket), "reason": reason} for bucket, reason in buckets]


def tokens(count: int) -> str:
    """`32K`, `1M`; plain where it is no whole number of K."""
    for shift, suffix in ((20, "M"), (10, "K")):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{suffix}"
    return str(count)


def short(shape: Shape | Bucket) -> str:
    """`32K b1 h16 bf16`, and what differs from a paged 512+64 cache and one query token."""
    parts = [tokens(shape.context), f"b{shape.batch}", f"h{shape.heads}"]
    parts.append(_SHORT_DTYPES[shape.dtype])
    if shape.q_len != 1:
        parts.append(f"q{shape.q_len}")
    if shape.layout != "paged":
        parts.append(shape.layout)
    if shape.geometry != DEEPSEEK:
        parts.append(str(shape.geometry))
    return " ".join(parts)


def plan_of(answer: Mapping[str, object]) -> Plan:
    """The plan in an answer that has `path`, `partitions` and `tile`."""
    partitions = answer["partitions"]
    assert isinstance(partitions, int)
    return Plan(str(answer["path"]), partitions, str(answer["tile"]))


def finite(value: object) -> object:
    """The same value with None for numbers that JSON has no text for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
