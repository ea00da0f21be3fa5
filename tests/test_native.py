"""The compiled kernel by itself, for every instruction set that runs here, against float64."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner import backends

pytestmark = pytest.mark.usefixtures("kernel")
native: Any = import_module("mla_tuner._native") if backends.get("cpu").available()[0] else None

BOUND = {
    "float32": 1e-5,
    "float16": 4e-4,
    "bfloat16": 2.5e-3,
}  # output rounding plus a margin, per row
GEOMETRIES = [(512, 64), (512, 0), (256, 64), (256, 32)]
tickets = count(1)


@pytest.fixture
def threads():
    before = native.threads()
    yield native.set_threads
    native.set_threads(before)


def as_mx(x: np.ndarray, dtype: str) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))


def as_float(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


@dataclass
class Case:
    """Random inputs; cache slots outside [start, length) are NaN, spare table entries wild."""

    lengths: list[int]
    heads: int = 3
    q_len: int = 1
    dtype: str = "float32"
    geometry: tuple[int, int] = (512, 64)
    block_size: int = 16  # 0: dense
    starts: list[int] = field(default_factory=list)
    spare: int = 5  # dense: slots past the longest sequence
    seed: int = 0
    scale: float = 0.08

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        rank, rope = self.geometry
        batch = len(self.lengths)
        self.starts = self.starts or [0] * batch
        self.q = rng.standard_normal((batch, self.heads, self.q_len, rank + rope))
        self.tokens = [rng.standard_normal((n, rank + rope)) for n in self.lengths]
        q = as_mx(self.q, self.dtype)
        self.q_nope, self.q_pe = q[..., :rank], q[..., rank:] if rope else None
        self.latent, self.k_pe, self.tables = self.paged(rng) if self.block_size else self.dense()
        mx.eval(self.q_nope, self.q_pe, self.latent, self.k_pe, self.tables)

    def paged(self, rng: np.random.Generator) -> tuple[mx.array, None, mx.array]:
        size = self.block_size
        pages = [-(-n // size) for n in self.lengths]
        blocks = rng.permutation(sum(pages) + 2)
        cache = np.full((sum(pages) + 2, size, sum(self.geometry)), np.nan)
        tables = np.full((len(pages), max(pages) + 2), 2**31 - 1, np.int32)
        for b, tokens in enumerate(self.tokens):
            tables[b, : pages[b]], blocks = blocks[: pages[b]], blocks[pages[b] :]
            for i in range(0, len(tokens), size):
                part = tokens[i : i + size]
                cache[tables[b, i // size], : len(part)] = part
        return as_mx(cache, self.dtype), None, mx.array(tables)

    def dense(self) -> tuple[mx.array, mx.array | None, None]:
        rank, rope = self.geometry
        slots = max(self.lengths) + self.spare
        cache = np.full((len(self.lengths), 1, slots, rank + rope), np.nan)
        for row, tokens, start in zip(cache, self.tokens, self.starts, strict=True):
            row[0, start : len(tokens)] = tokens[start:]
        latent = as_mx(cache[..., :rank], self.dtype)
        return latent, as_mx(cache[..., rank:], self.dtype) if rope else None, None

    def run(self, partitions: int = 1, tile: int = 0, **changed: Any) -> tuple[mx.array, mx.array]:
        self.ticket = next(tickets)
        arguments = {
            "q_nope": self.q_nope,
            "q_pe": self.q_pe,
            "latent": self.latent,
            "k_pe": self.k_pe,
            "block_tables": self.tables,
            "lengths": self.lengths,
            "starts": self.starts,
            "scale": self.scale,
            "partitions": partitions,
            "tile": tile,
            "ticket": self.ticket,
            "want_lse": True,
        }
        return native.mla_decode(**{**arguments, **changed})

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        rank = self.geometry[0]
        cast = lambda x: as_float(as_mx(x, self.dtype))  # noqa: E731
        q = cast(self.q)
        out, lse = np.zeros((*q.shape[:3], rank)), np.full(q.shape[:3], -np.inf)
        for b, j in product(range(q.shape[0]), range(self.q_len)):
            c = cast(self.tokens[b])[self.starts[b] : max(self.lengths[b] - self.q_len + 1 + j, 0)]
            if len(c):
                s = q[b, :, j] @ c.T * self.scale
                most = s.max(-1, keepdims=True)
                p = np.exp(s - most)
                out[b, :, j] = p @ c[:, :rank] / p.sum(-1, keepdims=True)
                lse[b, :, j] = most[:, 0] + np.log(p.sum(-1))
        return out, lse

    def check(self, partitions: int = 1, tile: int = 0, **changed: Any) -> dict[str, Any]:
        """Runs, compares with float64 and returns the record of the run."""
        out, lse = self.run(partitions, tile, **changed)
        mx.eval(out, lse)
        record = native.last_run()
        assert record["ticket"] == self.ticket
        assert record["isa"] == native.isa()
        assert out.dtype == getattr(mx, self.dtype)
        compare(self, as_float(out), np.array(lse))
        return record


def compare(case: Case, out: np.ndarray, lse: np.ndarray) -> None:
    want, want_lse = case.reference()
    empty = np.isneginf(want_lse)
    assert (np.isneginf(lse) == empty).all()
    assert (out[empty] == 0).all()
    np.testing.assert_allclose(lse[~empty], want_lse[~empty], rtol=1e-5, atol=2e-5)
    error = np.linalg.norm(out - want, axis=-1)[~empty] / np.linalg.norm(want, axis=-1)[~empty]
    assert error.max(initial=0) <= BOUND[case.dtype], f"worst row {error.max():.2e}"


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometry_dtype_layout(isa, geometry, block_size, dtype):
    for heads in (1, 20):
        case = Case([130, 1, 0, 64], heads, dtype=dtype, geometry=geometry, block_size=block_size)
        assert case.check(partitions=2)["partitions"] == 2


@pytest.mark.parametrize("heads", [*range(1, 21), 24, 31, 33, 48, 63, 96, 127, 128])
def test_heads(isa, heads):
    for dtype in ("float32", "bfloat16"):
        case = Case([70, 33], heads, dtype=dtype, geometry=(256, 32), seed=heads)
        record = case.check()
        assert record["partitions"] == 1
        assert case.check(tile=16)["tile"] == min(16, heads)


@pytest.mark.parametrize("q_len", [1, 2, 3, 8])
@pytest.mark.parametrize("block_size", [0, 32])
def test_causal_query_tokens(isa, block_size, q_len):
    """Also with fewer tokens than query tokens: their rows are exactly empty."""
    case = Case([200, 3, 1, 0, 65], 5, q_len, geometry=(256, 64), block_size=block_size)
    for partitions in (1, 3):
        case.check(partitions)
        assert case.check(partitions, tile=1)["tile"] == 1  # a row by itself, whichever it is


LENGTHS = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 72, 79, 80, 81, 127, 128, 129, 100, 1000]


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(isa, length):
    for block_size, dtype in ((0, "float32"), (8, "float32"), (16, "float32"), (24, "bfloat16")):
        for heads in (1, 9):
            case = Case(
                [length], heads, dtype=dtype, geometry=(256, 32), block_size=block_size, spare=0
            )
            case.check(partitions=1 + length % 2)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", BOUND)
def test_block_sizes(isa, dtype, block_size):
    for heads in (1, 3, 16, 17):
        Case([150, 259], heads, dtype=dtype, geometry=(256, 32), block_size=block_size).check(2)


@pytest.mark.parametrize("partitions", [1, 2, 3, 5, 8, 32, 64])
def test_partitions_agree_with_one(isa, partitions):
    """Pieces are rounded up to 64 tokens, so a short context is cut in fewer than asked for."""
    case = Case([1000, 64, 0, 500], 4, 2, geometry=(256, 32))
    piece = -(-1000 // partitions // 64) * 64 if partitions > 1 else 1024
    record = case.check(partitions)
    assert record["partitions"] == -(-1000 // max(piece, 64))
    assert Case([7], 1).check(64)["partitions"] == 1


def test_left_padding(isa):
    for dtype in BOUND:
        lengths, starts = [300, 90, 90, 300], [0, 7, 90, 299]
        case = Case(lengths, 6, dtype=dtype, block_size=0, starts=starts)
        for partitions in (1, 4):
            case.check(partitions)


def test_padding_hides_query_tokens(isa):
    """Three query tokens, two tokens: the first row attends nothing."""
    Case([10], 2, 3, block_size=0, starts=[8]).check()


def test_large_logits(isa):
    for dtype in BOUND:
        Case([300], 5, dtype=dtype, scale=2.0).check(3)


@pytest.mark.parametrize("dtype", BOUND)
def test_extreme_halves(isa, dtype):
    """Subnormals and the largest numbers are converted exactly, in both directions."""
    case = Case([1], 1, dtype=dtype, block_size=0)
    x = np.zeros(576)
    x[:8] = 6e-8, -6e-5, 1e-7, 65504, -65504, 6.1e-5, 3.05e-5, -0.0
    case.latent = as_mx(x[:512].reshape(1, 1, 1, 512), dtype)
    case.k_pe = mx.zeros((1, 1, 1, 64), case.latent.dtype)
    out, lse = case.run(scale=0.0)
    assert mx.array_equal(out.reshape(-1), case.latent.reshape(-1))
    assert lse.item() == 0


def test_lse_only_where_wanted(isa):
    case = Case([200, 33, 0], 5, 2)
    for partitions in (1, 2):
        out, nothing = case.run(partitions, want_lse=False)
        assert nothing is None
        assert mx.array_equal(out, case.run(partitions)[0])


class TestStrides:
    """No layout changes the answer, and none is copied but a strided last dimension."""

    @pytest.mark.parametrize("dtype", BOUND)
    def test_dense_slices(self, isa, dtype):
        case = Case([100, 61], 16, dtype=dtype, block_size=0)
        whole = mx.concatenate([case.latent, case.k_pe], axis=-1)
        longer = mx.concatenate([whole, whole * mx.nan], axis=2)[:, :, :105]
        case.check(2, latent=longer[..., :512], k_pe=longer[..., 512:])
        wide = mx.pad(case.latent, [(0, 0), (0, 0), (0, 0), (8, 24)])[..., 8:520]
        case.check(2, latent=wide)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_paged_slices(self, isa, dtype):
        case = Case([100, 61], 17, dtype=dtype, block_size=16)
        padded = mx.pad(case.latent, [(0, 0), (0, 16), (0, 32)])[:, :16, :576]
        layers = mx.stack([case.latent * mx.nan, case.latent], axis=1)
        for latent in (padded, layers[:, 1]):
            case.check(2, latent=latent)
        tables = mx.pad(case.tables.T, [(0, 0), (0, 3)])[:, :2].T
        case.check(2, block_tables=tables)

    def test_last_dimension_strided_or_reversed(self, isa):
        case = Case([40, 9], 3, 2, block_size=0)
        turned = case.latent.swapaxes(-1, -2) * 1
        case.check(latent=turned.swapaxes(-1, -2))
        flipped = mx.contiguous(case.latent[..., ::-1])
        case.check(latent=flipped[..., ::-1])

    def test_queries(self, isa):
        case = Case([40, 9], 20, 2)
        turned = (case.q_nope.swapaxes(1, 2) * 1).swapaxes(1, 2)
        columns = (case.q_pe.swapaxes(2, 3) * 1).swapaxes(2, 3)
        case.check(q_nope=turned, q_pe=columns)

    def test_broadcast_cache(self, isa):
        case = Case([40], 3, block_size=0)
        two = Case([40, 40], 3, block_size=0)
        two.tokens = [case.tokens[0]] * 2
        latent, k_pe = (mx.broadcast_to(x, (2, *x.shape[1:])) for x in (case.latent, case.k_pe))
        two.check(latent=latent, k_pe=k_pe)


class TestRecord:
    def test_written_when_executed(self, isa):
        before = native.last_run()
        case = Case([10])
        pending = case.run()
        assert native.last_run() == before
        mx.eval(pending)
        assert native.last_run()["ticket"] == case.ticket

    def test_default_tile_fills_idle_threads(self, threads):
        threads(2)
        assert Case([100], 128).check()["tile"] == 64
        assert Case([100], 128).check(2)["tile"] == 128
        assert Case([100, 100], 128).check()["tile"] == 128
        assert Case([100], 128, 2).check()["tile"] == 128
        record = Case([100], 20).check()
        assert (record["tile"], record["threads"], record["tasks"]) == (20, 1, 1)
        threads(1)
        assert Case([100], 128).check()["tile"] == 128

    def test_tile_is_at_most_all_rows(self):
        record = Case([200], 5, 2).check(2, tile=999)
        assert (record["tile"], record["tasks"]) == (10, 2)

    def test_more_threads_than_cores(self, threads):
        threads(70)
        record = Case([100] * 5, 40, dtype="bfloat16").check(2, tile=8)
        assert (record["tasks"], record["threads"]) == (50, 50)


def test_isa_by_name():
    assert native.isas()[-1] == "generic"
    assert native.isa() == native.isas()[0]
    with pytest.raises(ValueError, match="expected one that this CPU runs; got 'sse9'"):
        native.set_isa("sse9")
    with pytest.raises(ValueError, match="expected at least 1; got 0"):
        native.set_threads(0)


@pytest.mark.parametrize("wrong", [-1, 999])
def test_bad_block_id_is_an_error_and_the_stream_lives(isa, wrong):
    case = Case([40, 40])
    tables = np.array(case.tables)
    tables[1, 2] = wrong
    for want_lse in (True, False):
        answer = case.run(block_tables=mx.array(tables), want_lse=want_lse)
        with pytest.raises(RuntimeError, match=rf"got {wrong} for page 2 of sequence 1"):
            mx.eval(answer)
        for array in answer[: 1 + want_lse]:  # once available they must not look like an answer
            with suppress(RuntimeError):  # until then it raises again
                assert np.isnan(np.array(array)).all()
        case.check()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"lengths": [10**6]}, "lengths <= slots"),
        ({"lengths": [-1]}, "lengths <= slots"),
        ({"lengths": [40, 40]}, "lengths and starts"),
        ({"starts": [41]}, "lengths <= slots"),
        ({"partitions": 0}, "partitions in 1..256"),
        ({"partitions": 257}, "partitions in 1..256"),
        ({"tile": -1}, "tile >= 0"),
        ({"scale": float("nan")}, "finite scale"),
        ({"q_pe": None}, "latent"),
        ({"latent": mx.zeros((4, 16, 575))}, "latent"),
        ({"latent": mx.zeros((4, 16, 576), mx.float16)}, "latent of q_nope's dtype"),
        ({"q_nope": mx.zeros((1, 3, 1, 500))}, "geometry"),
        ({"q_nope": mx.zeros((1, 3, 512))}, "q_nope"),
        ({"q_nope": mx.zeros((1, 3, 1, 512), mx.int32)}, "float32, float16 or bfloat16"),
        ({"q_pe": mx.zeros((1, 4, 1, 64))}, "q_pe like q_nope"),
        ({"block_tables": mx.zeros((1, 4))}, "block_tables"),
        ({"k_pe": mx.zeros((1, 1, 40, 64))}, "latent"),
    ],
)
def test_nothing_that_leaves_its_buffers_is_built(changed, expected):
    with pytest.raises(ValueError, match=expected):
        Case([40]).run(**changed)


def test_dense_parts_must_match():
    case = Case([40], block_size=0)
    for changed in ({"k_pe": None}, {"k_pe": case.k_pe[:, :, :39]}, {"latent": case.latent[0]}):
        with pytest.raises(ValueError, match="expected"):
            case.run(**changed)


def test_lazy_in_a_graph(isa):
    """Inputs that are still being computed, and a consumer of the result."""
    case = Case([200, 77], 8, dtype="float16")
    q = case.q_nope * 2 / 2
    out, lse = case.run(3, q_nope=q, latent=mx.stack([case.latent, case.latent])[1])
    mx.eval(out2 := out + 0, lse2 := lse + 0)
    compare(case, as_float(out2), np.array(lse2))


def test_two_streams_at_once(threads):
    """Calls on several streams, evaluated from several Python threads, take turns."""
    threads(2)
    cases = [Case([500], 1 + 7 * i, dtype="bfloat16", seed=i) for i in range(3)]
    wanted = [case.reference() for case in cases]
    failures: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for i in range(10):
                    out, lse = case.run(1 + i % 3)
                    mx.eval(out, lse)
                    compare(case, as_float(out), np.array(lse))
        except BaseException as e:
            failures.append(e)

    for case, answer in zip(cases, wanted, strict=True):
        case.reference = lambda answer=answer: answer  # type: ignore[method-assign]
    workers = [threading.Thread(target=work, args=(case,)) for case in cases]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple's frameworks end a forked child")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_runs_and_ends(threads):
    """The parent's workers don't exist in the child: it starts its own, and ends without them."""
    threads(2)
    case = Case([300], 5)
    case.check(2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is ended by this signal
        status = 1
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                status = 0 if case.check(2)["threads"] == 2 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    case.check(2)
