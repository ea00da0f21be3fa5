"""What the Metal kernels do for a token, counted while the emulator runs the shipped text."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from mla_tuner.backends.metal_tiles import (
    THREADGROUP_BYTES,
    TILES,
    Matrix,
    merge_grid,
    useful,
)
from mla_tuner.cases import make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import DEEPSEEK, DTYPES, GEOMETRIES, Geometry, Shape
from tools import msl
from tools.msl import counts, registers
from tools.msl.decode import decode
from tools.msl.library import COUNTED
from tools.msl.translate import CPP

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]
MOST_THREADS = 512  # pipelines of an M1 may allow no more


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """Compiles the kernels of this file on all cores."""
    launches = []
    for tile in ("r16t16", "r16t16a", "r8t32", "v2t8"):
        case = make_case(Shape(512, 1, 16, "float16"))
        launches += decode(case, Plan("single", 1, tile), "dry").launches
    msl.prepare({launch.text for launch in launches}, "check")


@pytest.mark.parametrize(
    ("tile", "heads", "context"),
    [("r16t16", 16, 1024), ("r16t16", 128, 512), ("r16t16a", 16, 512), ("r8t32", 8, 512)],
)
def test_matrix_kernels_read_what_they_must_and_multiply_in_matrices(
    tile: str, heads: int, context: int
) -> None:
    found = counts.count(tile, heads, context)
    assert found.latent_read == found.groups * found.shape.cache_bytes
    assert found.read <= 1.02 * found.least_read
    assert found.matrix_share == 1.0
    work = heads * context * (2 * DEEPSEEK.kv_lora_rank + DEEPSEEK.rope_dim)
    assert found.counts.matrix_ops * counts.MULTIPLY_ADDS == work
    assert found.barriers_a_step == 2
    assert found.threadgroup_traffic <= 1536
    assert found.counts.simd_barriers == 0


def test_rows_of_the_vector_kernel_share_each_load() -> None:
    found = counts.count("v2t8", 2, 512)
    twice = DEEPSEEK.width + DEEPSEEK.kv_lora_rank  # as keys, and again as values
    assert found.latent_read == 2 * 512 * twice  # bytes of float16, for both rows
    assert found.counts.matrix_ops == 0
    assert found.counts.barriers == 5  # none in the loop


def test_a_half_full_last_tile_does_half_the_work() -> None:
    full, both = (counts.count("r16t16", heads, 128).counts.matrix_ops for heads in (16, 20))
    assert both == full * 24 / 16


def test_the_merge_reads_each_piece_once() -> None:
    case = make_case(Shape(150, 1, 16, "float16"))
    first, merge = decode(case, Plan("split", 3, "r16t16"), "check").launches
    assert first.counts is not None
    assert merge.counts is not None
    assert merge.counts.read["part"] == first.counts.written["out"] == 3 * 16 * 512 * 4
    assert merge.counts.written["out"] == 16 * 512 * 2
    assert merge.counts.barriers == merge.counts.threadgroup_bytes == 0


@pytest.mark.parametrize(("geometry", "dtype"), [*product(GEOMETRIES, DTYPES)])
def test_no_launch_is_too_large(geometry: Geometry, dtype: str) -> None:
    for name, tile in TILES.items():
        if tile.refusal(geometry, dtype) is not None:
            continue
        shape = Shape(150, 2, 20, dtype, geometry)
        launches = decode(make_case(shape), Plan("split", 3, name), "dry").launches
        for launch in launches:
            assert 32 <= launch.threadgroup[0] <= MOST_THREADS
            assert launch.threadgroup[1:] == (1, 1)
            assert all(n % m == 0 for n, m in zip(launch.grid, launch.threadgroup, strict=True))
        assert launches[1].grid == merge_grid(shape)
        assert tile.threadgroup_bytes(geometry, dtype) <= THREADGROUP_BYTES


def test_the_table_has_a_row_for_every_tile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(tile: str, heads: int, context: int, dtype: str) -> counts.Counted:
        numbers = dict.fromkeys(COUNTED, 1)
        read = dict.fromkeys(counts.INPUTS, 1)
        found = msl.Counts(read=read, written={}, **numbers)
        return counts.Counted(tile, Shape(context, 1, heads, dtype), found, 256)

    monkeypatch.setattr(counts, "count", count)
    counts.main()
    printed = capsys.readouterr().out.splitlines()
    columns = {line.count("|") for line in printed}
    assert len(columns) == 1
    for name, tile in TILES.items():
        lines = [line for line in printed if line.startswith(f"| `{name}` ")]
        assert len(lines) == (2 if name == "r16t16" else 1), name
        assert isinstance(tile, Matrix) or "| 0 |" in lines[0]
    assert sum("published" in line for line in printed) == 2
    assert sum(line.startswith("| `r16t8`, float32 |") for line in printed) == 1


# --- tools/msl/registers.py -----------------------------------------------------------------------


def test_registers_say_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert registers.main() == 1
    assert "ptxas" in capsys.readouterr().err


def test_registers_follow_the_declarations() -> None:
    declarations = (CPP / "declarations.h").read_text()
    assert "vec<T, 2> elements;" in registers.with_bodies(declarations)
    with pytest.raises(ValueError, match="once in declarations"):
        registers.with_bodies("")


# Registers that the default tiles for 1, 2, 4, 8 and 16 rows take at 512+64, spilling nothing.
LIMITS = {
    ("v1t8", "bfloat16"): 104,
    ("v2t8", "bfloat16"): 128,
    ("v4t8", "bfloat16"): 128,
    ("r8t32", "bfloat16"): 96,
    ("r16t16", "bfloat16"): 96,
    ("r8t16", "float32"): 96,
    ("r16t8", "float32"): 96,
}


@pytest.mark.skipif(not shutil.which("ptxas"), reason="ptxas (CUDA) is not on the path")
@pytest.mark.parametrize(("tile", "dtype"), LIMITS)
def test_default_tiles_fit_into_registers(tile: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the stand-in compiler is zig's clang")
    ptx = registers.to_ptx(registers.text_of(tile, dtype), tmp_path)
    used, spilled = registers.registers(ptx, LIMITS[tile, dtype])
    assert 64 < used <= LIMITS[tile, dtype]
    assert spilled == 0


def test_every_default_tile_has_its_limit() -> None:
    for dtype in ("bfloat16", "float32"):
        for rows in (1, 2, 4, 8, 16):
            default = useful(Shape(300, 1, rows, dtype))[0]
            assert (default, dtype) in LIMITS or (dtype, default[0]) == ("float32", "v")
