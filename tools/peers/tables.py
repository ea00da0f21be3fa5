"""What was measured, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .graphs import Time
from .ours import OURS
from .theirs import FA3_NAME, FA3_UNPLANNED, FLASH_MLA_NAME, TRITON_NAME

DECODE, MERGE = "decode", "merge"
_PEERS = {FA3_NAME: (FA3_NAME, FA3_UNPLANNED), FLASH_MLA_NAME: (FLASH_MLA_NAME,)}
_PEERS[TRITON_NAME] = (TRITON_NAME,)


@dataclass
class Row:
    """All of one shape. Plans and trials by variant; a trial is a plan's time in the sweep, in
    microseconds. Errors by contender.
    """

    label: str
    caches: int = 0
    times: dict[str, Time] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    trials: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def us(self, *names: str) -> float | None:
        """The shortest of those times."""
        return min((self.times[name].us for name in names if name in self.times), default=None)

    @property
    def spread(self) -> float:
        """The largest distance of a round from its median, as a share of it."""
        shares = (max(t.high - t.us, t.us - t.low) / t.us for t in self.times.values())
        return max(shares, default=0.0)


def part(variant: str, which: str) -> str:
    """Name of the time of one launch of a variant's plan."""
    return f"{variant} {which}"


def table(rows: Sequence[Row], variants: Sequence[str]) -> str:
    """Markdown: a line a shape, microseconds a call, then how many times slower the others are, and
    the largest distance of a round from its median.
    """
    others = [name for name in variants if name != OURS]
    peers = [peer for peer in _PEERS if any(row.us(*_PEERS[peer]) for row in rows)]
    head = ["batch x heads x context", *peers]
    for name in variants:
        head += [name, "plan", DECODE, MERGE]
    head += [*(f"{name}/{OURS}" for name in (*peers, *others)), "spread"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        own, cells = row.us(OURS), [row.label]
        slower = [row.us(*_PEERS[peer]) for peer in peers]
        cells += map(_us, slower)
        for name in variants:
            parts = (row.us(part(name, which)) for which in (DECODE, MERGE))
            cells += [_us(row.us(name)), row.plans.get(name, "-"), *map(_us, parts)]
        cells += [_ratio(us, own) for us in (*slower, *(row.us(name) for name in others))]
        lines.append(_line([*cells, f"{row.spread:.1%}"]))
    return "\n".join(lines)


def times_line(row: Row) -> str:
    """Every time with its rounds' lowest and highest, and the error of what is an answer."""
    found = []
    for name, time in row.times.items():
        plan = row.plans.get(name)
        error = row.errors.get(f"{name} {plan}" if plan else name)
        tail = "" if error is None else f", error {error:.1e}"
        found.append(f"{name} {time.us:.2f} ({time.low:.2f}..{time.high:.2f}{tail})")
    return " ".join(found)


def trial_lines(row: Row) -> list[str]:
    """A line a tile and variant, with the times by partitions, and one with each one's best."""
    lines = []
    for variant, trials in row.trials.items():
        for tile in dict.fromkeys(plan.partition(":")[0] for plan in trials):
            times = (
                f"{plan.partition(':')[2]}:{us:.1f}"
                for plan, us in trials.items()
                if plan.partition(":")[0] == tile
            )
            lines.append(" ".join((f"{row.label} {variant} {tile} ", *times)))
        if trials:
            best = min(trials, key=lambda plan: trials[plan])
            lines.append(f"{row.label} {variant} best {best} {trials[best]:.1f} us")
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _ratio(us: float | None, own: float | None) -> str:
    return "-" if us is None or own is None else f"{us / own:.2f}"
