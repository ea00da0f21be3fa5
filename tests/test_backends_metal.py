"""The Metal back end without its kernels: tiles, grids, texts, and every way to be refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from launches import nans, raising, zeros

from mla_tuner import ops, overview, verify
from mla_tuner.backends import Call, jit, metal, metal_tiles
from mla_tuner.backends.metal import MetalBackend
from mla_tuner.backends.shaders import Text, digest, minified
from mla_tuner.caches import DenseCache, PagedCache
from mla_tuner.candidates import rows_per_task
from mla_tuner.device import Device
from mla_tuner.plan import MLX, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import DTYPES, GEOMETRIES, TOKEN_TILE, Shape, piece_tokens

SHAPE = Shape(300, 1, 16)
DEFAULT = "r16t16"


# --- tiles and grids: plain arithmetic


@pytest.mark.parametrize("name", metal_tiles.TILES)
def test_a_tiles_name_says_its_rows_and_tokens(name: str) -> None:
    tile = metal_tiles.TILES[name]
    assert rows_per_task(name) == tile.rows
    assert f"t{tile.tokens}" in name
    assert TOKEN_TILE % tile.tokens == 0  # a piece ends where a step does


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_no_launch_is_beyond_the_limits(geometry: Any, dtype: str) -> None:
    for heads, q_len in product((1, 2, 3, 4, 5, 8, 9, 16, 17, 20, 128), (1, 8)):
        shape = Shape(300, 3, heads, dtype, geometry, q_len)
        names = metal_tiles.useful(shape)
        assert len(set(names)) == len(names) > 0
        for name in names:
            tile = metal_tiles.TILES[name]
            assert metal_tiles.refusal(name, shape) is None
            assert tile.threads(geometry) in (128, 256)
            assert tile.threadgroup_bytes(geometry, dtype) <= metal_tiles.THREADGROUP_BYTES
            threads, batch, partitions = metal_tiles.grid(tile, shape, 5)
            assert threads % tile.threads(geometry) == 0
            assert tile.rows * threads // tile.threads(geometry) >= shape.rows
            assert (batch, partitions) == (3, 5)
        merge = metal_tiles.merge_grid(shape)
        assert merge == (shape.rows * geometry.kv_lora_rank // 4, 3, 1)


def test_the_default_tile_goes_by_rows() -> None:
    first = {n: metal_tiles.useful(Shape(300, 1, n))[0] for n in (1, 2, 3, 4, 5, 8, 9, 20, 128)}
    assert first == {
        1: "v1t8",
        2: "v2t8",
        3: "v4t8",
        4: "v4t8",
        5: "r8t32",
        8: "r8t32",
        9: DEFAULT,
        20: DEFAULT,
        128: DEFAULT,
    }
    assert metal_tiles.useful(Shape(300, 1, 16, "float32"))[0] == "r16t8"


def test_registers_and_memory_are_those_counted() -> None:
    tile = metal_tiles.TILES[DEFAULT]
    assert isinstance(tile, metal_tiles.Matrix)
    assert tile.registers(GEOMETRIES[0], "float16") == 18 + 32 + 18 + 8
    assert tile.threadgroup_bytes(GEOMETRIES[0], "float16") == 8 * 16 * 20 * 4 + 16 * 24 * 2 + 128


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("r9", "float16", "the Metal kernels' tiles are v1t8, v2t8"),
        ("", "float16", "the Metal kernels' tiles are"),
        ("r16t8f", "float16", "tile r16t8f is not for it: only bfloat16 is worth converting"),
        ("r16t16", "float32", "it takes 112 registers of 104 in float32"),
    ],
)
def test_a_tile_that_does_not_fit_says_why(name: str, dtype: str, reason: str) -> None:
    found = metal_tiles.refusal(name, Shape(300, 1, 16, dtype))
    assert found is not None
    assert reason in found


def test_too_much_threadgroup_memory_is_a_reason() -> None:
    assert metal_tiles.Vector(64, 8).refusal(GEOMETRIES[0], "float16") == (
        "it takes 147584 bytes of threadgroup memory, 32768 are there"
    )


# --- texts


def test_minified_text_means_the_same() -> None:
    source = """
    // a comment
    #define TWICE(x) \\
      (2 * (x))   // of a directive
    template <typename T> /* long
    comment */ void f(thread T& a, int b) {
      a = b + +1 - -2; a = a / *p; s = "a  // b"; return b ? 1.0f : -2.0f;
    }
    #undef TWICE
    """
    assert minified(source) == (
        "#define TWICE(x) (2 * (x))\n"
        "template<typename T>void f(thread T&a,int b)"
        '{a=b+ +1- -2;a=a/ *p;s="a  // b";return b?1.0f: -2.0f;}\n'
        "#undef TWICE"
    )


@pytest.mark.parametrize(
    ("source", "short"),
    [
        ("0xe + b; 0x1E - 2; 1e-5f - x", "0xe +b;0x1E -2;1e-5f-x"),
        ("x = '//' + y; // c", "x='//'+y;"),
        ("""x = '"'; // c""", """x='"';"""),
        ("'a  b'", "'a  b'"),
        ("// a \\\nstill a comment\nx", "x"),
        ('#define F(x) "#x  y"  // c', '#define F(x) "#x  y"'),
        ("#define A (1)\nint x;\n#undef A", "#define A (1)\nint x;\n#undef A"),
        ("split\\\nword", "splitword"),
        ('asm("a" WORD "b")', 'asm("a" WORD "b")'),
        ("a > > b; c - -d; e & &f", "a> >b;c- -d;e& &f"),
    ],
)
def test_no_blank_goes_that_means_something(source: str, short: str) -> None:
    assert minified(source) == short


def test_a_raw_string_is_refused() -> None:
    with pytest.raises(ValueError, match="no raw strings"):
        minified('x = R"(// no comment)";')


def test_the_digest_tells_texts_apart() -> None:
    texts = [Text("a", "b"), Text("ab", ""), Text("", "ab"), Text("a", "c")]
    assert len({digest([text]) for text in texts}) == len(texts)
    assert len(digest(texts)) == 16


# --- refusals: MLX stands in for a Mac, its kernels for whatever a Mac might do


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], MetalBackend]:
    """A back end that finds Metal, where calling any kernel calls the given function."""

    def make(launch: Callable[..., Any]) -> MetalBackend:
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx.fast, "metal_kernel", lambda **options: launch)
        return MetalBackend()

    return make


def lanes_only(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The lane map as expected; everything else as `launch` does it."""

    def answer(**options: Any) -> Any:
        if options["output_shapes"] != [(32, 2)]:
            return launch(**options)
        first = [
            8 * ((n >> 2 & 4) | (n >> 1 & 3)) + 2 * ((n >> 2 & 2) | (n & 1)) for n in range(32)
        ]
        return [mx.array([[n, n + 1] for n in first], mx.float32)]

    return answer


@pytest.mark.parametrize("path", ["single", "split"])
@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (zeros, "lays out its 8 x 8 matrices in another way"),
        (lanes_only(zeros), "is wrong by 1.0e+00"),
        (lanes_only(nans), "is wrong by nan"),
        (
            raising(RuntimeError("[metal::Device] Unable to build\n  library")),
            "RuntimeError: [metal::Device] Unable to build library",
        ),
        (raising(ValueError("threadgroup 256 exceeds maximum 192")), "exceeds maximum 192"),
    ],
)
def test_a_kernel_that_fails_here_is_refused_with_the_reason(
    mac: Callable[[Callable[..., Any]], MetalBackend],
    launch: Callable[..., Any],
    reason: str,
    path: str,
) -> None:
    backend = mac(launch)
    plan = Plan(path, 2 if path == "split" else 1, DEFAULT)
    found = backend.refusal(plan, SHAPE)
    assert found is not None
    assert found.startswith(f"tile {DEFAULT} failed its check here")
    assert reason in found
    assert backend.refusal(MLX, SHAPE) is backend.refusal(Plan("mlx_rows"), SHAPE) is None
    passed, why = backend.self_check()
    assert not passed
    assert "failed its check here" in why


def test_a_check_is_made_once(mac: Callable[[Callable[..., Any]], MetalBackend]) -> None:
    calls: list[object] = []

    def launch(**options: Any) -> list[mx.array]:
        calls.append(options)
        return zeros(**options)

    backend = mac(launch)
    for _ in range(3):
        assert backend.refusal(Plan("split", 2, "v4t8"), SHAPE)
        assert backend.refusal(Plan("split", 5, "v4t8"), Shape(9000, 2, 4))
    assert len(calls) == 2  # one pass and its merge


def test_threads_that_ask_together_get_one_answer(
    mac: Callable[[Callable[..., Any]], MetalBackend],
) -> None:
    """Launches of other threads come between a proof's launch and its end."""
    backend, gate = mac(lanes_only(zeros)), threading.Barrier(4)
    found: list[str | None] = []

    def ask(tile: str) -> None:
        gate.wait()
        found.append(backend.refusal(Plan("split", 3, tile), SHAPE))

    asking = [threading.Thread(target=ask, args=(tile,)) for tile in ("r16t8", "v4t8") * 2]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 2
    assert all(reason and "is wrong by" in reason for reason in found)


def test_an_error_is_tried_again_but_not_for_ever(
    mac: Callable[[Callable[..., Any]], MetalBackend],
) -> None:
    calls: list[object] = []

    def launch(**options: Any) -> Any:
        calls.append(options)
        raise RuntimeError("[malloc] Unable to allocate")

    backend = mac(launch)
    for _ in range(9):
        reason = backend.refusal(Plan("single", 1, "v4t8"), SHAPE)
        assert reason is not None
        assert "Unable to allocate" in reason
    assert len(calls) == 3


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(
    ("tries", "compiled"),
    [
        ([(3.0, True)], [3.0]),
        ([(0.1, True)], []),  # as a part of another kernel
        ([(3.0, False), (0.1, True)], [3.0]),  # no memory to run it, at first
        ([(2.0, False), (1.0, False), (3.0, True)], [3.0]),
        ([(3.0, False), (3.0, False), (3.0, False)], []),  # a text that no compiler takes
    ],
)
def test_a_kernel_is_compiled_once_however_often_its_proof_is_tried(
    mac: Callable[[Callable[..., Any]], MetalBackend],
    monkeypatch: pytest.MonkeyPatch,
    tries: list[tuple[float, bool]],
    compiled: list[float],
    right: bool,
) -> None:
    clock, left = [0.0], list(tries)

    def fault(*given: Any) -> str | None:
        seconds, runs = left.pop(0)
        clock[0] += seconds
        if not runs:
            raise RuntimeError("Unable to allocate, or to compile")
        return None if right else "is wrong"

    monkeypatch.setattr(jit, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(jit, "fault", fault)
    backend = mac(lanes_only(zeros))
    found = [backend.refusal(Plan("single", 1, "v4t8"), Shape(300 + i, 1, 4)) for i in range(9)]
    assert [seconds for _, seconds in backend.compiled()] == pytest.approx(compiled)
    assert left == []  # and no more are made
    assert (found[-1] is None) is (right and tries[-1][1])


def test_what_is_proven_is_what_runs(mac: Callable[[Callable[..., Any]], MetalBackend]) -> None:
    """A short context is cut in one piece: the kernel that writes the result itself."""
    outputs: list[object] = []

    def launch(**options: Any) -> list[mx.array]:
        outputs.append(dict(options["template"])["Out"])
        return zeros(**options)

    backend = mac(launch)
    assert backend.refusal(Plan("split", 4, "v4t8"), Shape(60, 1, 4))
    assert outputs == [mx.bfloat16]


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize("layout", ["paged", "dense", "empty"])
def test_no_input_is_so_short_that_it_makes_another_text(
    mac: Callable[[Callable[..., Any]], MetalBackend], layout: str, batch: int
) -> None:
    backend, seen = mac(zeros), []
    geometry = GEOMETRIES[1]  # without rope
    shape = Shape(0 if layout == "empty" else 40, batch, 4, "float16", geometry, 1, "paged")
    latent, lengths = mx.zeros((3 * batch, 16, 512), mx.float16), (shape.context,) * batch
    cache: PagedCache | DenseCache = PagedCache(latent, mx.zeros((batch, 3), mx.int32), lengths)
    if layout != "paged":
        shape = replace(shape, layout="dense")
        dense = mx.zeros((batch, 1, shape.context, 512), mx.float16)
        cache = DenseCache(dense, mx.zeros((batch, 1, shape.context, 0), mx.float16), lengths)
    query = mx.zeros((batch, 4, 1, 512), mx.float16)
    call = Call(query, None, cache, 1.0, shape, lengths, (0,) * batch, 1)
    for array in backend._inputs(call, 64):
        seen.append(array.size)
    assert all(size >= 8 for size in seen[:-2])  # the last two are numbers, passed by themselves
    assert len(seen) == 9


def test_a_refusal_shows_in_plan_and_in_probe(
    mac: Callable[[Callable[..., Any]], MetalBackend],
) -> None:
    backend = mac(zeros)
    here = Device("metal", "applegpu_g16s", "apple-m4", 10, 24, "Apple M4", 1 << 26)
    policy = Policy(here, [], backend=backend)
    decision, last = policy.decide(32768, 1, 16, "bfloat16"), None
    for step in policy.explain(32768, 1, 16, "bfloat16"):
        last = step
    assert last is not None
    assert decision.plan == MLX
    for text in (decision.reason, last.reason, last.details[-1], overview.refused(backend)[-1]):
        assert "lays out its 8 x 8 matrices in another way" in text


def test_verify_fails_with_the_reason_where_every_tile_is_refused(
    mac: Callable[[Callable[..., Any]], MetalBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = mac(lanes_only(zeros))
    monkeypatch.setattr(ops, "_backend", lambda: backend)
    found = verify.check_kernels(backend)
    assert {check.ok for check in found if check.isa != "mlx"} == {False}
    assert {check.variant.split()[-1] for check in found if check.isa != "mlx"} == {
        *metal_tiles.TILES
    }
    assert all("failed its check here" in check.reason for check in found if not check.ok)
    assert all(check.ok for check in found if check.isa == "mlx")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(mx.metal, "is_available", lambda: False), "no Metal device"),
        (lambda patch: patch.delattr(mx.fast, "metal_kernel"), "has no mx.fast.metal_kernel"),
        (
            lambda patch: patch.setattr(metal, "text", raising(FileNotFoundError("gone"))),
            "are not installed: reinstall mla-tuner",
        ),
    ],
)
def test_without_kernels_only_mlx_runs(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    change(monkeypatch)
    backend = MetalBackend()
    able, why = backend.available()
    assert not able
    assert reason in why
    assert backend.self_check() == (False, why)
    assert backend.refusal(Plan("split", 2), SHAPE) == why
    assert backend.refusal(MLX, SHAPE) is None
    assert backend.tiles(SHAPE) == ()


def test_the_cache_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def metal_kernel(**options: Any) -> Callable[..., Any]:
        made.append(options)
        return zeros

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    backend = MetalBackend()
    for name in ("v1t8", DEFAULT):
        backend.refusal(Plan("split", 2, name), SHAPE)
    assert [options["ensure_row_contiguous"] for options in made] == [False] * len(made)
    assert {"mla_vector", "mla_lanes"} <= {options["name"] for options in made}


def test_pieces_are_whole_steps_of_every_tile() -> None:
    for context, partitions in product((1, 63, 64, 65, 4097, 1 << 20), (1, 2, 7, 64)):
        piece = piece_tokens(context, partitions)
        assert all(piece % tile.tokens == 0 for tile in metal_tiles.TILES.values())
