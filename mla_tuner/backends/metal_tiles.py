"""Tiles of the Metal kernels and how they are launched: plain arithmetic, no MLX.

A tile says how many query rows and tokens a threadgroup takes at once. `r16t16` belongs to the
matrix kernel (8 x 8 products): 16 rows, 16 tokens; a final `a` loads the next tokens ahead, `f`
converts bfloat16 to float32 before the products. `v2t8` belongs to the vector kernel: 2 rows and 8
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ..shapes import DTYPE_BYTES, Geometry, Shape

LANES = 32  # threads of a simdgroup
THREADGROUP_BYTES = 32768  # the least that any Apple GPU has; MLX asks for no more
# Of a lane: two groups of 256 threads share the 208 KB of a core if each lane takes 104 registers.
# That size is public knowledge, not measured here.
MAX_REGISTERS = 104
_SLICE = 64  # latent dimensions that a simdgroup of the matrix kernel owns
_FEW_ROWS = 4  # up to here the vector kernel does less work
_EIGHT_ROWS = 8

Template = list[tuple[str, "int | bool | str"]]  # dtypes by name: "T", "Out", "M"


@dataclass(frozen=True)
class Matrix:
    """A tile of the matrix kernel; a simdgroup owns 64 latent dimensions of all tokens and rows."""

    rows: int
    tokens: int
    ahead: bool = False
    wide: bool = False  # operands in float32

    kernel = "matrix"

    @staticmethod
    def threads(geometry: Geometry) -> int:
        """Of a threadgroup."""
        return geometry.kv_lora_rank // _SLICE * LANES

    def operand(self, dtype: str) -> str:
        """Dtype of the products' operands; they are summed in float32 always."""
        return "float32" if self.wide else dtype

    def threadgroup_bytes(self, geometry: Geometry, dtype: str) -> int:
        """Partial scores of all simdgroups, weights, and two numbers a row."""
        size, simds = DTYPE_BYTES[self.operand(dtype)], self.threads(geometry) // LANES
        scores = 4 * simds * self.rows * (self.tokens + 4)
        return scores + size * self.rows * (self.tokens + 16 // size) + 8 * self.rows

    def registers(self, geometry: Geometry, dtype: str) -> int:
        """32-bit registers of a lane that live through the loop: queries, O, tokens, scores."""
        simds = self.threads(geometry) // LANES
        words = DTYPE_BYTES[self.operand(dtype)] / 2  # a lane's two elements of an 8 x 8 matrix
        tiles = geometry.width // 8 // simds
        blocks, steps = self.rows // 8, self.tokens // 8
        queries, cached = tiles * blocks * words, tiles * steps * words
        outputs = 2 * geometry.kv_lora_rank // 8 // simds * blocks
        return int(queries + outputs + cached * (1 + self.ahead) + 2 * blocks * steps)

    def refusal(self, geometry: Geometry, dtype: str) -> str | None:
        """Why this tile is not for such a cache; None if it is."""
        if self.wide and dtype != "bfloat16":
            return f"only bfloat16 is worth converting, not {dtype}"
        registers = self.registers(geometry, dtype)
        if registers > MAX_REGISTERS:
            return f"it takes {registers} registers of {MAX_REGISTERS} in {dtype}"
        return _memory(self.threadgroup_bytes(geometry, dtype))

    def template(self, geometry: Geometry, dtype: str) -> Template:
        """The kernel's own template arguments."""
        return [
            ("SIMDS", self.threads(geometry) // LANES),
            ("M", self.operand(dtype)),
            ("ROW_BLOCKS", self.rows // 8),
            ("TOKEN_BLOCKS", self.tokens // 8),
            ("AHEAD", self.ahead),
        ]


@dataclass(frozen=True)
class Vector:
    """A tile of the vector kernel: simdgroups of 1 or 2 rows each, all dimensions a simdgroup."""

    rows: int
    tokens: int

    kernel = "vector"
    simds = 8

    @property
    def rows_each(self) -> int:
        """Rows of one simdgroup; they share each load of a token."""
        return min(2, self.rows)

    def threads(self, geometry: Geometry) -> int:
        """Of a threadgroup, whatever the geometry."""
        return self.simds * LANES

    def threadgroup_bytes(self, geometry: Geometry, dtype: str) -> int:
        """Queries, later the simdgroups' sums, and two numbers a row of each simdgroup."""
        shared = max(self.rows * geometry.width, self.simds * geometry.kv_lora_rank)
        return 4 * shared + 8 * self.simds * self.rows_each

    def refusal(self, geometry: Geometry, dtype: str) -> str | None:
        """Why this tile is not for such a cache; None if it is."""
        return _memory(self.threadgroup_bytes(geometry, dtype))

    def template(self, geometry: Geometry, dtype: str) -> Template:
        """The kernel's own template arguments."""
        return [
            ("SIMDS", self.simds),
            ("ROWS", self.rows_each),
            ("GROUPS", self.rows // self.rows_each),
            ("STEP", self.tokens),
        ]


Tile = Matrix | Vector

TILES: dict[str, Tile] = {
    "v1t8": Vector(1, 8),
    "v2t8": Vector(2, 8),
    "v4t8": Vector(4, 8),
    "r8t32": Matrix(8, 32),
    "r8t16": Matrix(8, 16),
    "r8t16f": Matrix(8, 16, wide=True),
    "r16t16": Matrix(16, 16),
    "r16t16a": Matrix(16, 16, ahead=True),
    "r16t8": Matrix(16, 8),
    "r16t32": Matrix(16, 32),
    "r16t8f": Matrix(16, 8, wide=True),
    "r24t8": Matrix(24, 8),
}


def refusal(name: str, shape: Shape) -> str | None:
    """Why the tile of that name can't take the shape; None if it can."""
    if name not in TILES:
        return f"the Metal kernels' tiles are {', '.join(TILES)}"
    reason = TILES[name].refusal(shape.geometry, shape.dtype)
    return f"tile {name} is not for it: {reason}" if reason else None


def useful(shape: Shape) -> tuple[str, ...]:
    """Tiles worth trying, the default first: legal ones that don't pay for many idle rows.

    The default is an estimate by counted work, never timed on a GPU: the fewest loads of the latent
    that fit, the vector kernel up to 4 rows.
    """
    return _useful(shape.rows, shape.dtype, shape.geometry)


@lru_cache(maxsize=1024)
def _useful(rows: int, dtype: str, geometry: Geometry) -> tuple[str, ...]:
    legal = [name for name, tile in TILES.items() if tile.refusal(geometry, dtype) is None]
    if rows <= _FEW_ROWS:
        fit = [name for name in legal if name.startswith("v") and TILES[name].rows >= rows][:1]
        rest = [name for name in legal if name.startswith("r8")]
    elif rows <= _EIGHT_ROWS:
        fit = [name for name in legal if name.startswith("r8")]
        rest = ["v4t8"]
    else:
        fit = [name for name in legal if name.startswith("r16")]
        rest = [name for name in legal if name.startswith("r24" if rows > 16 else "r8")]
    return (*fit, *rest)


def row_tiles(tile: Tile, rows: int) -> int:
    """Threadgroups that the rows of one sequence need."""
    return ceil(rows / tile.rows)


def grid(tile: Tile, shape: Shape, partitions: int) -> tuple[int, int, int]:
    """Threads of a launch: (row tiles x threads of a group, batch, partitions)."""
    return row_tiles(tile, shape.rows) * tile.threads(shape.geometry), shape.batch, partitions


def merge_grid(shape: Shape) -> tuple[int, int, int]:
    """Threads of the merge: a threadgroup a row, four dimensions a thread."""
    return shape.rows * shape.geometry.kv_lora_rank // 4, shape.batch, 1


def _memory(nbytes: int) -> str | None:
    if nbytes <= THREADGROUP_BYTES:
        return None
    return f"it takes {nbytes} bytes of threadgroup memory, {THREADGROUP_BYTES} are there"
