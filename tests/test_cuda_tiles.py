"""The CUDA kernels' tiles, grids and pieces: plain arithmetic."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from mla_tuner.backends import cuda_tiles
from mla_tuner.plan import Plan
from mla_tuner.shapes import (
    DTYPES,
    GEOMETRIES,
    LAYOUTS,
    TOKEN_TILE,
    Shape,
    effective_batch,
    piece_tokens,
)

SHAPE = Shape(300, 1, 16)
DEFAULT = "r16"
HOPPER = 90
CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize("name", cuda_tiles.TILES)
def test_a_tiles_name_says_its_rows(name: str) -> None:
    tile = cuda_tiles.TILES[name]
    assert name.startswith(f"r{tile.rows}")
    assert name.removeprefix(f"r{tile.rows}") in ("", "w", "p", "f")
    if tile.kernel in ("small", "portable"):  # a piece ends where a step does
        assert TOKEN_TILE % tile.tokens == 0


@pytest.mark.parametrize(
    ("geometry", "dtype", "layout", "capability"),
    [*product(GEOMETRIES, DTYPES, LAYOUTS, CAPABILITIES)],
)
def test_no_launch_is_beyond_the_limits(
    geometry: Any, dtype: str, layout: str, capability: int
) -> None:
    for heads, q_len in product((1, 2, 5, 8, 9, 16, 17, 20, 24, 25, 32, 40, 63, 128), (1, 8)):
        shape = Shape(300, 3, heads, dtype, geometry, q_len, layout)
        names = cuda_tiles.useful(shape, capability)
        assert len(set(names)) == len(names) > 0
        for name in names:
            tile = cuda_tiles.TILES[name]
            assert cuda_tiles.refusal(name, shape, capability) is None
            needed = tile.shared_bytes(geometry, layout)
            assert needed <= cuda_tiles.shared_bytes(capability) <= 232448
            threads, batch, pieces = cuda_tiles.grid(tile, shape, 64)
            assert threads % tile.threads == 0
            assert tile.rows * threads // tile.threads >= shape.rows
            assert (batch, pieces) == (3, 5)


def test_the_default_tile_goes_by_rows() -> None:
    rows = (1, 8, 9, 16, 17, 24, 25, 33, 128)

    def first(capability: int, **other: Any) -> list[str]:
        return [cuda_tiles.useful(Shape(300, 1, n, **other), capability)[0] for n in rows]

    small, wide = ["r8", "r8", "r16", "r16", "r24", "r24"], ["r64w"] * 3
    assert first(HOPPER) == small + wide
    assert first(HOPPER, geometry=GEOMETRIES[1]) == small + ["r32"] * 3
    assert first(100) == small + ["r32"] * 3
    assert first(80) == first(120) == ["r16p"] * 4 + ["r32p"] * 5
    assert set(first(HOPPER, dtype="float32")) == {"r8f"}


def test_shared_memory_is_that_counted() -> None:
    tile = cuda_tiles.TILES[DEFAULT]
    tokens, rows = 64, 16
    sums = 256 + 8 * rows + 2 * rows * (2 * tokens + 16) + 4 * 4 * rows * (tokens + 4)
    cached = 2 * 8 * (8 * 576 * 2 + 16)
    assert tile.shared_bytes(GEOMETRIES[0], "paged") == -(-sums // 128) * 128 + cached
    dense = cached + 2 * 8 * 16  # two arrays: 16 bytes more a group
    assert tile.shared_bytes(GEOMETRIES[0], "dense") == -(-sums // 128) * 128 + dense


@pytest.mark.parametrize(
    ("name", "shape", "capability", "reason"),
    [
        ("r9", SHAPE, HOPPER, "the CUDA kernels' tiles are r8, r16"),
        ("", SHAPE, HOPPER, "the CUDA kernels' tiles are"),
        ("r16", Shape(300, 65536, 16), HOPPER, "take up to 65535 sequences"),
        ("r16", SHAPE, 89, "tile r16 is not for it: the small kernel needs sm_90 or later"),
        ("r16", SHAPE, 120, "it takes 170112 bytes of shared memory, 101376 are there"),
        ("r64w", SHAPE, 100, "the wide kernel needs sm_90"),
        ("r64w", Shape(300, 1, 16, geometry=GEOMETRIES[2]), HOPPER, "kernel is for 512+64"),
        ("r16p", Shape(300, 1, 16, "float32"), HOPPER, "does not compute in float32"),
        ("r8f", SHAPE, HOPPER, "the simple kernel does not compute in bfloat16"),
    ],
)
def test_a_tile_that_does_not_fit_says_why(
    name: str, shape: Shape, capability: int, reason: str
) -> None:
    found = cuda_tiles.refusal(name, shape, capability)
    assert found is not None
    assert reason in found


def test_the_merge_has_work_for_every_core_and_few_pieces_a_lane() -> None:
    for units, partitions, cores in product((4, 128, 1024, 32768), (2, 3, 64, 128), (8, 132)):
        groups = cuda_tiles.merge_groups(units, partitions, cores)
        assert groups in (1, 2, 4, 8, 16)
        assert groups < 2 * partitions
        assert groups * 8 >= partitions
        if groups // 2 * 8 >= partitions:  # more than that: for the cores' sake
            assert units * groups // 2 // 16 < cores
    assert cuda_tiles.merge_groups(32 * 128 * 8, 2, 132) == 1


def test_the_merges_blocks_tell_how_many_teams_share_a_unit() -> None:
    for heads, geometry, partitions in product(range(1, 129), GEOMETRIES[::2], (2, 9, 64)):
        shape = Shape(1 << 15, 2, heads, geometry=geometry)
        units = heads * geometry.kv_lora_rank // 64
        blocks = cuda_tiles.merge_grid(shape, partitions, 132)[0] // 256
        groups = 1  # as merge.cuh finds it
        while groups < 16 and -(-units * groups // 16) < blocks:
            groups *= 2
        assert blocks * 16 // groups >= units
        assert -(-units * groups // 16) == blocks


def test_capability_reads_names_and_never_raises() -> None:
    names = {"sm_90": 90, "sm_121": 121, "sm_90a": 0, "": 0, "unknown": 0, "sm_٣": 0, "sm_": 0}
    assert {name: cuda_tiles.capability(name) for name in names} == names


# --- ragged batches

LENGTHS = (
    (131072, *(2048,) * 15),
    (100, 0, 5000),
    (64, 65, 64, 64),
    (8192, 8191, 4000, 1),
    (0, 0, 7),
    tuple(range(1, 9000, 100)),
)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("partitions", [1, 2, 8, 128])
def test_a_ragged_batch_has_pieces_of_equal_work(lengths: tuple[int, ...], partitions: int) -> None:
    shape = Shape(max(lengths), len(lengths), 16, lengths=lengths)
    partitions = (
        Plan("split" if partitions > 1 else "single", partitions).cut(shape.context).partitions
    )
    piece = cuda_tiles.piece_of(shape, partitions)
    work = cuda_tiles.work_list(lengths, piece)
    seen = [min(lengths[b] - at * piece, piece) for b, at in work]
    assert piece % TOKEN_TILE == 0
    assert sum(seen) == sum(lengths)
    assert len(set(work)) == len(work)
    assert seen == sorted(seen, reverse=True)
    assert (piece >= shape.context) == (partitions == 1)
    if partitions == 1:  # an empty one's result is written, too
        assert sorted(work) == [(b, 0) for b in range(shape.batch)]
    else:
        assert min(seen) > 0
        even = piece_tokens(shape.context, partitions)
        most = partitions * effective_batch(lengths) + sum(length <= even for length in lengths)
        twice = min(2 * even, piece_tokens(shape.context, 2))  # it stays a split
        assert len(work) <= most or piece == twice
        if even < piece < twice:  # it grew no more than it had to
            assert cuda_tiles.work(lengths, piece - TOKEN_TILE) > most
    assert cuda_tiles.work(lengths, piece) == len(work)
    assert cuda_tiles.grid(cuda_tiles.TILES[DEFAULT], shape, piece) == (288, len(work), 1)


@pytest.mark.parametrize("short", [64, 256, 1024, 2048])
@pytest.mark.parametrize("partitions", [8, 64, 128])
def test_many_short_sequences_leave_a_long_one_its_pieces(short: int, partitions: int) -> None:
    for others in range(1, 256):
        lengths = (131072, *(short,) * others)
        shape = Shape(131072, len(lengths), 16, lengths=lengths)
        piece = cuda_tiles.piece_of(shape, partitions)
        assert piece <= 2 * piece_tokens(131072, partitions)


def test_more_pieces_than_a_grid_has_rows_take_two_dimensions() -> None:
    lengths = (70000, *(69999,) * 700)
    shape = Shape(70000, len(lengths), 16, lengths=lengths)
    piece = cuda_tiles.piece_of(shape, 256)
    pieces = cuda_tiles.work(lengths, piece)
    _, height, depth = cuda_tiles.grid(cuda_tiles.TILES[DEFAULT], shape, piece)
    assert 65535 < pieces <= height * depth < pieces + depth
    assert max(height, depth) <= 65535
