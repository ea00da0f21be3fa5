"""What serving did: how many calls were routed, by which plan, and why the others were not."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

log = logging.getLogger("mla_tuner")


@dataclass
class Stats:
    """Counts since `install`, of attention calls of the classes that were recognised.

    routed: calls that ran through `mla_decode`. stock: calls that ran the engine's own code, or the
    same maths where the cache was already written. plans: routed calls by plan. reasons: stock
    calls by reason. look_ups: plans looked up, one a step. classes: "routed" for each attention
    class of the engine, or why it is left alone.
    """

    routed: int = 0
    stock: int = 0
    look_ups: int = 0
    plans: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    classes: dict[str, str] = field(default_factory=dict)

    def count_routed(self, plan: str) -> None:
        self.routed += 1
        self.plans[plan] += 1

    def count_stock(self, reason: str, detail: str = "") -> None:
        """The first call of each reason is a log line."""
        if reason not in self.reasons:
            log.info("mlx-lm's own attention runs: %s%s", reason, f" ({detail})" if detail else "")
        self.stock += 1
        self.reasons[reason] += 1

    def copy(self) -> Stats:
        return Stats(
            self.routed,
            self.stock,
            self.look_ups,
            Counter(self.plans),
            Counter(self.reasons),
            dict(self.classes),
        )

    def __str__(self) -> str:
        lines = [f"{self.routed} calls routed, {self.stock} stock, {self.look_ups} look-ups"]
        lines += [f"  {count} by {plan}" for plan, count in self.plans.most_common()]
        lines += [f"  {count} stock: {why}" for why, count in self.reasons.most_common()]
        return "\n".join(lines)
