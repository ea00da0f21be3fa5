"""A plan says how to run a decode call; a decision adds where the plan came from and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .shapes import MAX_PARTITIONS, pieces

# `mlx`: what mlx-lm and vllm-metal do today. `mlx_rows`: the same maths, heads as rows of a matmul.
# `mlx_fused`: MLX's fused attention where its own rule would not take it.
# `single`: one pass of our kernel. `split`: partitions of the context side by side, then a merge.
PATHS = ("mlx", "mlx_rows", "mlx_fused", "single", "split")
NATIVE_PATHS = ("single", "split")
# In the order of the look-up.
Source = Literal["caller", "off", "tuned", "fitted", "family", "gates"]


@dataclass(frozen=True)
class Plan:
    """Path, partition count and tile (kernel variant; "" for the back end's default).

    Raises:
        ValueError: a field is of another type, or the three don't go together.
    """

    path: str
    partitions: int = 1
    tile: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or self.path not in PATHS:
            raise ValueError(f"[Plan] expected path in {PATHS}; got {self.path!r}")
        low, high = (2, MAX_PARTITIONS) if self.path == "split" else (1, 1)
        # A bool is an int, and 2.0 compares like one: neither is a count.
        if type(self.partitions) is not int or not low <= self.partitions <= high:
            raise ValueError(
                f"[Plan] expected partitions in {low}..{high} for path {self.path}; "
                f"got {self.partitions!r}"
            )
        if not isinstance(self.tile, str):
            raise ValueError(f"[Plan] expected tile as text; got {self.tile!r}")
        if self.tile and not self.native:
            raise ValueError(f"[Plan] expected no tile for path {self.path}; got {self.tile!r}")

    @property
    def native(self) -> bool:
        """True where our own kernel runs."""
        return self.path in NATIVE_PATHS

    def cut(self, context: int) -> Plan:
        """What really runs at that context: a short one has fewer pieces than were asked for."""
        if not self.native:
            return self
        count = pieces(context, self.partitions)
        return Plan("split" if count > 1 else "single", count, self.tile)

    def __str__(self) -> str:
        partitions = f" x{self.partitions}" if self.path == "split" else ""
        return f"{self.path}{partitions}" + (f" {self.tile}" if self.tile else "")


MLX = Plan("mlx")
MLX_PLANS = (MLX, Plan("mlx_rows"), Plan("mlx_fused"))


@dataclass(frozen=True)
class Decision:
    """A plan, the step of the look-up that gave it, and one sentence that says why.

    `expected_us` is the plan's median time; `speedup` is over `baseline`, one of MLX's paths, with
    its confidence interval. All four are None where nothing was measured.
    """

    plan: Plan
    source: Source
    reason: str
    expected_us: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    baseline: str = MLX.path
