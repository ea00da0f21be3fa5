"""Simulated devices: what a plan would take on a chip, from its figures. Nothing here is measured.

They exist to try rules on machines that nobody has at hand. No stored or shipped table may come
from them. Times are seconds of one call, noise not included (see `noise`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mla_tuner.candidates import row_groups, rows_per_task
from mla_tuner.device import Device
from mla_tuner.plan import Plan
from mla_tuner.shapes import DTYPE_BYTES, TOKEN_TILE, Shape, piece_tokens

GEMM_ROWS = 32  # MLX's matrix products pad their rows to that
SCORE_PASSES = 6  # over [rows, context]: write, scale, mask, softmax twice, read
MLX_LAUNCHES = 8  # gather, rope scores, mask, scores, softmax, values (split-K: two), copy
ROWS_LAUNCHES = 9


@dataclass(frozen=True)
class Hardware:
    """A device and the figures that its times follow from.

    Of the whole device: `bandwidth` bytes/s from memory; `cache_gain`, how many times faster what
    was just read or written comes again; `gemm` FLOP/s of MLX's matrix products, `rows_gemm` where
    the heads are rows; `batched_reads`, True where `mlx` reads the latent once a head from two
    sequences on.
    Of one core: `core_bandwidth` bytes/s; `token_s`, pairs (rows, seconds per token) of a task that
    has the core for itself; `resident` tasks side by side, one of which reaches `alone` of the
    core's rate. Rows are padded to `row_step`.
    Of a call: `launch_s` of a kernel on the device, `host_s` of a kernel on the host, which runs
    ahead; `task_s` before a task's first token; `merge_s` before a merge's first byte. `overlap`
    is the share of the shorter one of memory and arithmetic time that is *not* hidden.
    """

    device: Device
    bandwidth: float
    core_bandwidth: float
    cache_gain: float
    gemm: float
    rows_gemm: float
    token_s: tuple[tuple[int, float], ...]
    launch_s: float
    host_s: float
    task_s: float
    merge_s: float
    tiles: tuple[int, ...]
    row_step: int = 8
    resident: int = 1
    alone: float = 1.0
    overlap: float = 0.2
    batched_reads: bool = True
    compile_s: float = 0.0  # the first call of a tile in a process

    def seconds(self, shape: Shape, plan: Plan) -> float:
        """One call as serving makes it: the host runs ahead, unless the device is faster."""
        launches = {"mlx": MLX_LAUNCHES, "mlx_rows": ROWS_LAUNCHES, "single": 1, "split": 2}
        if plan.path == "mlx" and len(set(shape.all_lengths)) > 1:
            host = shape.batch * MLX_LAUNCHES * self.host_s  # one sequence after the other
        else:
            host = launches[plan.path] * self.host_s
        return max(host, self.device_seconds(shape, plan))

    def device_seconds(self, shape: Shape, plan: Plan) -> float:
        """The device's part of a call."""
        return _device_seconds(self, shape, plan)

    # --- our kernel --------------------------------------------------------------------------

    def native_seconds(self, shape: Shape, plan: Plan) -> float:
        """Waves of tasks, then the merge."""
        cores = self.device.cores or 1
        slots = cores * self.resident
        piece = piece_tokens(shape.context, plan.partitions)
        groups = row_groups(shape.rows, plan.tile)
        pieces = sum(-(-length // piece) for length in shape.all_lengths)
        tasks = groups * pieces
        tokens = sum(shape.all_lengths) / pieces  # of a task, on average
        longest = min(piece, shape.context)
        total, left = self.launch_s, tasks
        while left > 0:
            total += self._wave(shape, plan, min(left, slots), groups, longest, tokens)
            left -= slots
        if plan.path == "split":
            nbytes = shape.rows * shape.batch * plan.partitions * shape.geometry.kv_lora_rank * 8
            total += self.launch_s + self.merge_s + nbytes / (self.cache_gain * self.bandwidth)
        return total

    def _wave(
        self, shape: Shape, plan: Plan, tasks: int, groups: int, longest: int, mean: float
    ) -> float:
        cores = self.device.cores or 1
        on_one = -(-tasks // cores)  # tasks of the busiest core
        rate = min(1.0, on_one * self.alone) / on_one  # of that core, for each of them
        rows = min(shape.rows, rows_per_task(plan.tile))
        arithmetic = longest * self._token_s(rows) / rate
        token_bytes = shape.geometry.width * DTYPE_BYTES[shape.dtype]
        width = min(self.bandwidth, min(tasks, cores) * self.core_bandwidth)
        fresh = tasks * mean * token_bytes / groups
        again = fresh * (groups - 1)  # other row tiles find it in a cache
        memory = fresh / width + again / (self.cache_gain * width)
        return self.task_s + max(arithmetic, memory) + self.overlap * min(arithmetic, memory)

    def _token_s(self, rows: int) -> float:
        paid = -(-rows // self.row_step) * self.row_step
        return next(seconds for most, seconds in self.token_s if most >= paid)

    # --- plain MLX ---------------------------------------------------------------------------

    def mlx_seconds(self, shape: Shape) -> float:
        """The default path; ragged batches run one sequence after the other, as in the code."""
        lengths = shape.all_lengths
        if len(set(lengths)) > 1:
            return sum(self._mlx(replace(shape, context=n, batch=1, lengths=())) for n in lengths)
        return self._mlx(shape)

    def _mlx(self, shape: Shape) -> float:
        latent = shape.cache_bytes
        moved = self._gather(shape) + self._scores(shape) + 2 * latent
        seconds = moved / self.bandwidth
        if self.batched_reads and shape.batch > 1:  # products of one row each, head by head
            seconds += 2 * latent * (shape.rows - 1) / (self.cache_gain * self.bandwidth)
            return MLX_LAUNCHES * self.launch_s + seconds
        return MLX_LAUNCHES * self.launch_s + max(seconds, self._products(shape, self.gemm))

    def rows_seconds(self, shape: Shape) -> float:
        """The heads as rows of one matrix product."""
        moved = self._gather(shape) + self._scores(shape) + 2 * shape.cache_bytes
        products = self._products(shape, self.rows_gemm)
        return ROWS_LAUNCHES * self.launch_s + max(moved / self.bandwidth, products)

    def _products(self, shape: Shape, rate: float) -> float:
        padded = -(-shape.rows // GEMM_ROWS) * GEMM_ROWS
        return shape.flop / shape.rows * padded / rate

    def _gather(self, shape: Shape) -> int:
        return 2 * shape.cache_bytes if shape.layout == "paged" else 0

    def _scores(self, shape: Shape) -> int:
        scores = shape.rows * sum(shape.all_lengths)
        return SCORE_PASSES * scores * DTYPE_BYTES[shape.dtype]


@lru_cache(maxsize=1 << 18)
def _device_seconds(hardware: Hardware, shape: Shape, plan: Plan) -> float:
    if plan.path == "mlx":
        return hardware.mlx_seconds(shape)
    if plan.path == "mlx_rows":
        return hardware.rows_seconds(shape)
    return hardware.native_seconds(shape, plan)


# --- Apple -------------------------------------------------------------------------------------

# Chip: (GPU cores by bin, GB/s by bin, fp32 TFLOP/s of the last bin, architecture). Specifications
# as listed in public tables (recalled, unprobed); a `?` bin there (M5 8, M5 Pro 16) is taken.
_APPLE: dict[str, tuple[tuple[int, ...], tuple[float, ...], float, str]] = {
    "M1": ((7, 8), (68, 68), 2.6, "applegpu_g13g"),
    "M1 Pro": ((14, 16), (200, 200), 5.2, "applegpu_g13s"),
    "M1 Max": ((24, 32), (400, 400), 10.4, "applegpu_g13s"),
    "M1 Ultra": ((48, 64), (800, 800), 20.8, "applegpu_g13d"),
    "M2": ((8, 10), (100, 100), 3.6, "applegpu_g14g"),
    "M2 Pro": ((16, 19), (200, 200), 6.8, "applegpu_g14s"),
    "M2 Max": ((30, 38), (400, 400), 13.6, "applegpu_g14s"),
    "M2 Ultra": ((60, 76), (800, 800), 27.2, "applegpu_g14d"),
    "M3": ((8, 10), (100, 100), 3.6, "applegpu_g15g"),
    "M3 Pro": ((14, 18), (150, 150), 6.4, "applegpu_g15s"),
    "M3 Max": ((30, 40), (300, 400), 14.2, "applegpu_g15s"),
    "M3 Ultra": ((60, 80), (819, 819), 28.4, "applegpu_g15d"),
    "M4": ((8, 10), (120, 120), 4.3, "applegpu_g16g"),
    "M4 Pro": ((16, 20), (273, 273), 8.6, "applegpu_g16s"),
    "M4 Max": ((32, 40), (410, 546), 17.2, "applegpu_g16s"),
    "M5": ((8, 10), (153, 153), 4.4, "applegpu_g17g"),
    "M5 Pro": ((16, 20), (307, 307), 8.8, "applegpu_g17s"),
    "M5 Max": ((32, 40), (460, 614), 17.5, "applegpu_g17s"),
}
_MEMORY_GB = {"": 16, "Pro": 32, "Max": 64, "Ultra": 128}
_LANES = 128  # multiply-adds a clock and core
APPLE_BANDWIDTH = 0.8  # of the specification: 437 of 546, 655 of 819, 491 of 614 GB/s
APPLE_GEMM = 0.65  # of the ALU peak: 17.4-19.6 of 28.4 TFLOP/s, quoted for an M3 Ultra
APPLE_NAX_GEMM = 55 / 17.5  # M5 with macOS 26.2: 55 TFLOP/s in bf16, quoted for 40 cores
# Clocks per token of the matrix kernel, counted under an emulator: 188 for 16 rows and 98 for 8
# with products at 80 % of their rate; 229 for 16 rows if nothing overlaps. The last is taken.
_CLOCKS_TOKEN, _CLOCKS_ROW, _NO_OVERLAP = 8.0, 11.25, 229 / 188
APPLE_LAUNCH_S = 2.5e-6  # a tiny dependent kernel: 2.4-2.8 us, quoted
# Quoted for an Ultra, 20 heads, batch 2: 16.6 ns a token and sequence more from 32K to 131K. With
# two reads of 1152 bytes a head that is 2.8 TB/s, 4.3 times what its memory gives.
APPLE_CACHE_GAIN = 4.3


def apple(chip: str, cores: int, *, kernel: float = 1.0, nax: bool = True) -> Hardware:
    """An Apple GPU. `kernel`: our kernel's rate against the counts above; `nax`: M5's matrix units
    serve MLX's products (they don't serve our kernel).

    A core count that isn't sold scales bandwidth and arithmetic with the cores.

    Raises:
        KeyError: the chip is not in the table.
    """
    bins, widths, tflops, architecture = _APPLE[chip]
    clock = tflops * 1e12 / (bins[-1] * _LANES * 2)
    known = dict(zip(bins, widths, strict=True))
    bandwidth = APPLE_BANDWIDTH * known.get(cores, widths[-1] * cores / bins[-1]) * 1e9
    peak = cores * _LANES * 2 * clock
    gemm = peak * (APPLE_NAX_GEMM if nax and chip.startswith("M5") else APPLE_GEMM)
    clocks = {rows: (_CLOCKS_TOKEN + _CLOCKS_ROW * rows) * _NO_OVERLAP for rows in (8, 16)}
    _, _, kind = chip.partition(" ")
    memory = _MEMORY_GB[kind]
    family = f"apple-{chip[:2].lower()}"
    name = f"simulated {chip}, {cores} cores"
    return Hardware(
        Device("metal", architecture, family, cores, memory, name, 96 << 20),
        bandwidth=bandwidth,
        core_bandwidth=32 * clock,  # assumed: half of what L1 gives, 64 bytes a clock
        cache_gain=APPLE_CACHE_GAIN,
        gemm=gemm,
        rows_gemm=gemm,
        token_s=tuple((rows, count / clock / kernel) for rows, count in clocks.items()),
        launch_s=APPLE_LAUNCH_S,
        host_s=3e-6,  # assumed
        task_s=2e-6,  # assumed
        merge_s=1e-6,  # assumed
        tiles=(16, 8),
        resident=2,  # 208 KB of registers a core and 76-104 registers a lane (recalled)
        alone=0.6,  # assumed: one group leaves the core idle while it waits
        compile_s=0.3,  # assumed
    )


def apples(*, kernel: float = 1.0, nax: bool = True) -> Iterator[Hardware]:
    """Every bin that is sold, M1 to M5, 7 to 80 cores."""
    for chip, (bins, *_) in _APPLE.items():
        for cores in bins:
            yield apple(chip, cores, kernel=kernel, nax=nax)


# --- a CPU and an H200 -------------------------------------------------------------------------


def cpu(cores: int = 2) -> Hardware:
    """Cores like those of an Emerald Rapids virtual machine (AVX-512, 3 GHz; measured 2026-11-29).

    16 heads of bfloat16: 146 GFLOP/s a core, 128 heads: 156; 5 heads of 32K: 3.0 ms. MLX's own
    products: 895 ms for 16 heads of 32K on two cores (1.3 GFLOP/s), with heads as rows half of it.
    """
    return Hardware(
        Device("cpu", "x86_64-avx512", "x86_64-avx512", cores, 24, "simulated CPU", 64 << 20),
        bandwidth=16e9 * cores,
        core_bandwidth=17e9,
        cache_gain=3.0,
        gemm=1.3e9 * GEMM_ROWS / 16,  # the padding is in that figure
        rows_gemm=2.5e9 * GEMM_ROWS / 16,
        token_s=tuple((rows, 20e-9 + 13.6e-9 * rows) for rows in range(1, 129)),
        launch_s=7e-6,
        host_s=1e-6,
        task_s=8e-6,
        merge_s=1e-6,
        tiles=(16, 32, 64, 128),
        row_step=1,
        overlap=0.1,
        batched_reads=False,
    )


def h200() -> Hardware:
    """One H200, calibrated on a sweep of an earlier kernel (driver 580.159.04, 2026-11-29).

    A task of 64 tokens takes 1.29 us for 16 rows, 1.63 for 24, 2.15 for 64; reads reach 4.2 TB/s.
    Through MLX a kernel costs the host 10-15 us. `mlx` took 155 us at 32K, batch 1, 16 heads.
    """
    tile_us = {8: 0.95, 16: 1.29, 24: 1.63, 32: 1.97, 64: 2.15}
    return Hardware(
        Device("cuda", "sm_90", "nvidia-sm90", 132, 141, "simulated H200", 50 << 20),
        bandwidth=4.2e12,
        core_bandwidth=190e9,
        cache_gain=1.7,
        gemm=20e12,
        rows_gemm=20e12,
        token_s=tuple((rows, us * 1e-6 / TOKEN_TILE) for rows, us in tile_us.items()),
        launch_s=0.7e-6,
        host_s=12e-6,
        task_s=3.2e-6,
        merge_s=1.5e-6,
        tiles=(8, 16, 24, 32, 64),
        overlap=0.25,
        compile_s=2.0,
    )


# --- back ends ---------------------------------------------------------------------------------


class StandIn:
    """A back end that says what kernels would take, and runs nothing."""

    name: str

    def available(self) -> tuple[bool, str]:
        return True, ""

    def signature(self, *arrays: Any) -> Hashable:
        raise NotImplementedError("a stand-in runs nothing")

    def run(self, plan: Plan, call: Any) -> Any:
        raise NotImplementedError("a stand-in runs nothing")

    def executed(self, ticket: int) -> Plan | None:
        return None

    def detail(self, ticket: int) -> dict[str, object]:
        return {}

    def proof(self, plan: Plan, shape: Shape) -> tuple[bool, str]:
        return self.self_check()

    def compiled(self) -> tuple[tuple[str, float], ...]:
        return ()

    def self_check(self) -> tuple[bool, str]:
        return True, "a stand-in agrees with itself"


class SimBackend(StandIn):
    """The kernels of a simulated device."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.name = hardware.device.backend

    def digest(self) -> str:
        return "simulated"

    def tiles(self, shape: Shape) -> tuple[str, ...]:
        """Every tile up to the first that holds all rows; first the largest of at most 64."""
        ascending = sorted(self.hardware.tiles)
        fit = next(
            (i for i, tile in enumerate(ascending) if tile >= shape.rows), len(ascending) - 1
        )
        useful = ascending[: fit + 1]
        first = max(tile for tile in useful if tile <= 64)
        return tuple(f"r{tile}" for tile in sorted(useful, key=lambda tile: (tile != first, tile)))

    def refusal(self, plan: Plan, shape: Shape, want_lse: bool = False) -> str | None:
        return "no fused attention is modelled" if plan.path == "mlx_fused" else None
