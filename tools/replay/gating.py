"""What the gates do on every Apple GPU that is sold, by the model of `devices`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from mla_tuner import gates
from mla_tuner.plan import MLX
from mla_tuner.policy import Policy
from mla_tuner.shapes import CONTEXT_GRID, Shape

from .devices import Hardware, SimBackend, apples
from .lab import Score, percent

LOSS = 1.05  # an untuned plan may be that much slower than mlx, by the model
HEADS = (8, 10, 16, 20, 32, 40, 64, 96, 128)
BATCHES = (1, 2, 3, 4, 8)


def losses(hardware: Iterable[Hardware], contexts: Sequence[int] = CONTEXT_GRID) -> Score:
    """Splits that the gates choose and the model calls more than 5 % slower than `mlx`."""
    bad = splits = 0
    worst = 0.0
    for one in hardware:
        backend = SimBackend(one)
        for shape in _shapes(contexts):
            plan, _ = gates.gate(shape.bucket, one.device, backend)
            if plan == MLX:
                continue
            splits += 1
            loss = one.seconds(shape, plan) / one.seconds(shape, MLX)
            worst = max(worst, loss)
            bad += loss > LOSS
    return Score(
        "gates choose a plan > 5 % slower than mlx, M1 to M5, 7 to 80 cores",
        f"{percent(bad, splits)}, worst {worst:.2f}x",
        "0",
        bad == 0 and splits > 0,
    )


def holes(hardware: Iterable[Hardware]) -> Score:
    """Contexts at which an untuned split falls back to `mlx` though a shorter one is split."""
    found = asked = 0
    for one in hardware:
        policy = Policy(one.device, backend=SimBackend(one))
        for heads in HEADS:
            for batch in BATCHES:
                split = False
                for context in _steps():
                    plan = policy.decide(context, batch, heads, "bfloat16").plan
                    asked += 1
                    found += split and plan == MLX
                    split = plan != MLX
    return Score(
        "holes: a longer context falls back to mlx", percent(found, asked), "0", found == 0
    )


def _steps() -> Iterable[int]:
    """The tuned grid and one token beside every edge between its buckets."""
    steps = set(CONTEXT_GRID)
    for low, high in pairwise(CONTEXT_GRID):
        edge = round((low * high) ** 0.5)
        steps |= {low + 1, edge - 1, edge, edge + 1, high - 1}
    return sorted(steps)


def _shapes(contexts: Sequence[int]) -> Iterable[Shape]:
    for heads in HEADS:
        for batch in BATCHES:
            for context in contexts:
                yield Shape(context, batch, heads)


def scores() -> list[Score]:
    """On the model as it is, with M5's matrix units and without; and, untargeted, a poor kernel."""
    main = [*apples(), *(one for one in apples(nax=False) if "M5" in one.device.name)]
    poor = losses(apples(kernel=0.6))
    told = Score(f"{poor.name}, were our kernel 0.6 times as fast", poor.measured)
    return [losses(main), holes(main), told]
