"""What the Metal kernels do for a token, counted by the emulator: the table of docs/metal.md.

    python -m tools.msl.counts

Bytes are summed over lanes; nothing is said about caches, and no Apple GPU is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_tuner.backends.metal_tiles import TILES, Matrix, row_tiles
from mla_tuner.cases import check, make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import DEEPSEEK, DTYPE_BYTES, Shape

from .decode import decode
from .library import Counts

BLOCK_SIZE = 64
INPUTS = ("q_nope", "q_pe", "latent", "k_pe", "block_table", "lengths", "starts", "piece", "scale")
MULTIPLY_ADDS = 512  # of one product of 8x8 matrices


@dataclass(frozen=True)
class Counted:
    """One launch of a decode kernel over one sequence, 512+64, paged."""

    tile: str
    shape: Shape
    counts: Counts
    threads: int  # of a threadgroup

    @property
    def groups(self) -> int:
        return row_tiles(TILES[self.tile], self.shape.rows)

    @property
    def read(self) -> int:
        """Bytes of all inputs; the shapes and strides that MLX passes beside them are left out."""
        return sum(self.counts.read.get(name, 0) for name in INPUTS)

    @property
    def latent_read(self) -> int:
        """Bytes of the cache: latent and rope numbers."""
        return self.counts.read["latent"] + self.counts.read["k_pe"]

    @property
    def least_read(self) -> int:
        """Bytes: the cache once a row tile, each query once, the table once a row tile."""
        size, width = DTYPE_BYTES[self.shape.dtype], DEEPSEEK.width
        table = 4 * -(-self.shape.context // BLOCK_SIZE)
        return self.groups * (self.shape.cache_bytes + table) + self.shape.rows * width * size

    @property
    def matrix_share(self) -> float:
        """Of all multiply-adds of scores and values, those in simdgroup_matrix operations."""
        inside = MULTIPLY_ADDS * self.counts.matrix_ops
        return inside / (inside + self.counts.fmas)

    @property
    def barriers_a_step(self) -> float:
        """Threadgroup barriers for each tile of tokens, without the one before the result."""
        steps = -(-self.shape.context // TILES[self.tile].tokens)
        return (self.counts.barriers / self.groups - 1) / steps

    @property
    def threadgroup_traffic(self) -> float:
        """Bytes read and written in threadgroup memory, for each token and row tile."""
        moved = self.counts.threadgroup_read + self.counts.threadgroup_written
        return moved / self.groups / self.shape.context


def count(tile: str, heads: int, context: int, dtype: str = "float16") -> Counted:
    """Runs one pass in the checked mode; the answer is held to float64.

    Raises:
        ValueError: the answer is wrong.
    """
    shape, plan = Shape(context, 1, heads, dtype), Plan("single", 1, tile)
    case = make_case(shape, block_size=BLOCK_SIZE)
    done = decode(case, plan, "check")
    result = check(case, done.out, done.lse, plan)
    if not result.ok:
        raise ValueError(f"[count] expected a right answer; got {result.reason}")
    (launch,) = done.launches
    if launch.counts is None:
        raise ValueError("[count] expected the counts of a checked launch; got none")
    threads = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2]
    return Counted(tile, shape, launch.counts, threads)


def row(counted: Counted) -> str:
    """A line of the table."""
    heads, least = counted.shape.heads, DEEPSEEK.width * DTYPE_BYTES[counted.shape.dtype]
    latent = counted.latent_read / counted.shape.context
    matrix = isinstance(TILES[counted.tile], Matrix)
    cells = [
        f"`{counted.tile}`" + (", float32" if counted.shape.dtype == "float32" else ""),
        f"{heads}",
        f"{latent:.0f} B, {latent / least:.3g} x",
        f"{counted.read / counted.least_read:.3f}",
        f"{100 * counted.matrix_share:.0f} %",
        f"{counted.barriers_a_step:.0f}" if matrix else "0",
        f"{counted.threadgroup_traffic:.0f} B",
        f"{counted.threads}",
        f"{counted.counts.threadgroup_bytes} B",
    ]
    return f"| {' | '.join(cells)} |"


def published(heads: int) -> str:
    """The one-pass vector design that others have published: every head reads the cache itself, or
    two share a read. Computed from its description, not run.
    """
    least = DEEPSEEK.width * DTYPE_BYTES["float16"]
    low, high = heads // 2, heads
    cells = [f"{low * least} to {high * least} B, {low} to {high} x", "-", "0 %", *["-"] * 4]
    return f"| published one-pass design | {heads} | {' | '.join(cells)} |"


HEADER = """\
| tile | heads | cache read a token | all reads / least | in matrix products | barriers a step |\
 threadgroup traffic a token | threads | threadgroup memory |
|---|---|---|---|---|---|---|---|---|"""
CONTEXTS = {1: 2048, 2: 2048, 4: 2048, 8: 2048, 16: 2048, 24: 2048, 128: 512}  # tokens, by heads


def main() -> None:
    print(HEADER)
    for heads, context in CONTEXTS.items():
        for name, tile in TILES.items():
            fits = tile.rows == heads or (heads == 128 and name == "r16t16")
            dtype = "bfloat16" if name.endswith("f") else "float16"
            if fits:
                print(row(count(name, heads, context, dtype)), flush=True)
            if heads == 16 and name == "r16t8":  # what float32 gets for more than 8 rows
                print(row(count(name, heads, context, "float32")), flush=True)
        if heads >= 16 and heads != 24:
            print(published(heads))


if __name__ == "__main__":
    main()
