"""Loading the native kernel safely, what each back end offers, and MLX's own paths."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import mla_tuner
from mla_tuner import DenseCache, backends, mla_decode
from mla_tuner.backends import cpu
from mla_tuner.backends.cpu import CpuBackend
from mla_tuner.backends.mlx_paths import MlxBackend
from mla_tuner.cases import Case, check, make_case
from mla_tuner.device import usable_cores
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape

INSTALLED = vars(mx)["__version__"]
SHAPE = Shape(300, 1, 16)


def native() -> Any:
    from mla_tuner import _native

    return _native


class FakeNative:
    """Stands for `_native` where its absence or its faults are the point."""

    def __init__(self, **changes: Any) -> None:
        self.record = {"ticket": 0}
        self.count = 0
        vars(self).update(changes)

    def check_runtime(self) -> None: ...

    def set_threads(self, count: int) -> None:
        self.count = count

    def last_run(self) -> dict[str, int]:
        return self.record


def install(
    monkeypatch: pytest.MonkeyPatch, module: object, built_for: str | None = INSTALLED
) -> CpuBackend:
    """A new back end that finds `module` as `_native`; built_for None: there is no build at all."""
    info = SimpleNamespace(MLX_VERSION=built_for, KERNEL_DIGEST="feed")
    monkeypatch.setitem(sys.modules, "mla_tuner._build_info", info if built_for else None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mla_tuner._native", module)  # type: ignore[arg-type]
    return CpuBackend()


def outdated() -> None:
    raise ImportError("libmlx is 0.1.2")


# --- the registry


def test_one_back_end_a_name() -> None:
    for name in backends.NAMES:
        assert backends.get(name).name == name
        assert backends.get(name) is backends.get(name)
    with pytest.raises(ValueError, match=r"a name in \('cpu', 'metal', 'cuda'\); got 'tpu'"):
        backends.get("tpu")


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_back_end_without_kernels_says_so(name: str) -> None:
    backend = backends.get(name)
    reason = f"no native kernel for {name} is built in"
    assert backend.available() == backend.self_check() == (False, reason)
    assert backend.refusal(Plan("split", 2), SHAPE) == reason
    assert backend.refusal(MLX, SHAPE) is backend.refusal(Plan("mlx_rows"), SHAPE) is None
    assert (backend.tiles(16), backend.digest()) == ((), "")
    assert (backend.executed(1), backend.detail(1)) == (None, {})


def test_tickets_are_unique() -> None:
    assert len({backends.next_ticket() for _ in range(100)}) == 100


# --- the CPU kernel


def test_the_kernel_is_built_and_right() -> None:
    backend = backends.get("cpu")
    assert backend.available() == (True, "")
    assert backend.self_check() == (True, "the CPU kernel agrees with mlx_rows")
    assert len(backend.digest()) == 16


def test_tiles_start_with_the_default() -> None:
    assert {rows: backends.get("cpu").tiles(rows) for rows in (1, 16, 20, 64, 65, 128, 1024)} == {
        1: ("r16",),
        16: ("r16",),
        20: ("r32", "r16"),
        64: ("r64", "r16", "r32"),
        65: ("r64", "r16", "r32", "r128"),
        128: ("r64", "r16", "r32", "r128"),
        1024: ("r64", "r16", "r32", "r128"),
    }


def test_refusals_name_the_tiles() -> None:
    backend = backends.get("cpu")
    # A stored plan's bucket rounds q_len, so a tile larger than the rows must stay legal.
    for plan in (MLX, Plan("single"), Plan("split", 64, "r128"), Plan("single", 1, "r16")):
        assert backend.refusal(plan, Shape(0, 1, 1)) is None
    refusal = backend.refusal(Plan("single", 1, "q8"), SHAPE)
    assert refusal == "the CPU kernel's tiles are r16, r32, r64, r128"


@pytest.mark.parametrize("tile", ["", "r16", "r32", "r64", "r128"])
@pytest.mark.parametrize("heads", [5, 16, 20, 128])
def test_every_tile_runs_as_asked(heads: int, tile: str) -> None:
    case, plan = make_case(Shape(130, 1, heads)), Plan("split", 2, tile)
    out = mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan)
    assert check(case, out, None, plan).ok
    found = mla_tuner.last_run()
    assert found is not None
    assert found.executed is not None
    assert (found.executed.path, found.executed.partitions) == ("split", 2)
    if tile in backends.get("cpu").tiles(heads):
        assert found.executed == plan


def test_tickets_beyond_31_bits_come_round() -> None:
    backend, case = backends.get("cpu"), make_case(SHAPE)
    for ticket in ((1 << 31) + 7, (1 << 40) + 9):
        lengths = case.shape.all_lengths
        call = backends.Call(
            case.q_nope, case.q_pe, case.cache, 1.0, case.shape, lengths, (0,), ticket
        )
        mx.eval(backend.run(Plan("split", 2), call)[0])
        assert backend.executed(ticket) == Plan("split", 2, "r16")
        assert backend.executed(ticket + 1) is None


def test_threads_follow_the_cores_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for text, count in (("", usable_cores()), ("3", 3), ("0", usable_cores())):
        monkeypatch.setenv("MLA_TUNER_THREADS", text)
        fake = FakeNative()
        assert install(monkeypatch, fake).available() == (True, "")
        assert fake.count == count
    assert [record.getMessage() for record in caplog.records] == [
        "MLA_TUNER_THREADS='0' is not a positive number: ignored"
    ]


@pytest.mark.parametrize(
    ("module", "built_for", "words"),
    [
        (None, None, [INSTALLED, "not built"]),
        (FakeNative(), "0.1.2", [INSTALLED, "0.1.2"]),
        (None, INSTALLED, [INSTALLED, "does not load"]),
        (FakeNative(check_runtime=outdated), INSTALLED, [INSTALLED, "libmlx is 0.1.2"]),
    ],
    ids=["no build", "another MLX", "no binary", "another libmlx"],
)
def test_without_the_kernel_mlx_serves(
    module: object,
    built_for: str | None,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = install(monkeypatch, module, built_for)
    for _ in range(2):
        able, reason = backend.available()
        assert not able
        assert all(word in reason for word in [*words, "make setup"])
        assert backend.self_check() == (False, reason)
        assert backend.refusal(Plan("single"), SHAPE) == reason
        assert backend.refusal(MLX, SHAPE) is None
    assert (backend.digest(), backend.tiles(16), backend.executed(1)) == ("", (), None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text


def test_a_binary_for_another_mlx_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"touched {name}")

    assert not install(monkeypatch, Trap(), "0.1.2").available()[0]


def test_serving_survives_without_the_kernel() -> None:
    """In a process of its own: import, decide, run, and one warning."""
    code = """
import sys
sys.modules["mla_tuner._build_info"] = None
import mla_tuner
from mla_tuner.cases import Shape, check, make_case
case = make_case(Shape(100, 2, 5))
for _ in range(2):
    out = mla_tuner.mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale)
run = mla_tuner.last_run()
assert check(case, out, None, run.plan).ok
print(run.executed, "|", run.decision.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mlx | ")
    assert done.stderr.count("the CPU kernel is not built") == 1


# --- the self-check


def broken(change: str) -> Any:
    """The real kernel with one fault."""

    def decode(*arguments: Any) -> Any:
        if change == "raises":
            raise RuntimeError("no memory")
        if change == "never splits":
            arguments = (*arguments[:8], 1, *arguments[9:])
        out, lse = native().mla_decode(*arguments)
        return {
            "zeros": (mx.zeros_like(out), lse),
            "NaN": (out * mx.nan, lse),
            "LSE in bits": (out, lse / 0.6931472),
        }.get(change, (out, lse))

    return FakeNative(mla_decode=decode, last_run=native().last_run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("zeros", "single in float32 is wrong by 1.0e"),
        ("NaN", "is wrong by nan"),
        ("LSE in bits", "LSE by"),
        ("never splits", "asked for split x3, the CPU kernel ran single"),
        ("raises", "RuntimeError: no memory"),
    ],
)
def test_the_self_check_finds(change: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = install(monkeypatch, broken(change))
    passed, reason = backend.self_check()
    assert not passed
    assert message in reason
    assert backend.self_check() == (passed, reason)


def test_the_self_check_leaves_no_trace_in_random_numbers() -> None:
    mx.random.seed(3)
    want = mx.random.normal((4,))
    mx.random.seed(3)
    assert CpuBackend().self_check()[0]
    assert mx.array_equal(mx.random.normal((4,)), want)


def test_the_self_check_bounds_match_its_dtypes() -> None:
    assert {mx.float32, mx.float16, mx.bfloat16} == set(cpu._SELF_CHECK_BOUND)


# --- MLX's own paths


def stock(case: Case) -> mx.array:
    """What mlx-lm's absorbed models compute for one token."""
    assert isinstance(case.cache, DenseCache)
    assert case.cache.k_pe is not None
    assert case.q_pe is not None
    latent, k_pe = case.cache.latent, case.cache.k_pe
    mask = (case.q_pe * case.scale) @ k_pe.swapaxes(-1, -2)
    attention = mx.fast.scaled_dot_product_attention
    return attention(case.q_nope, latent, latent, scale=case.scale, mask=mask)


@pytest.mark.parametrize("batch", [1, 3])
def test_mlx_is_exactly_what_engines_run(batch: int) -> None:
    case = make_case(Shape(100, batch, 16, layout="dense"), strided=True)
    out = mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=MLX)
    assert mx.array_equal(out, stock(case))


def test_equal_lengths_run_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop over sequences where none is needed: the measured baseline must not be slowed."""
    calls = []
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(a[0].shape) or attention(*a, **k),
    )
    for lengths, shapes in (((64, 64), [(2, 5, 1, 512)]), ((64, 32), [(1, 5, 1, 512)] * 2)):
        for layout in ("paged", "dense"):
            calls.clear()
            case = make_case(Shape(64, 2, 5, layout=layout, lengths=lengths))
            mla_decode(case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=MLX)
            assert calls == shapes


@pytest.mark.parametrize("plan", [MLX, Plan("mlx_rows"), Plan("split", 2)], ids=str)
def test_nothing_is_evaluated_while_building(plan: Plan) -> None:
    case = make_case(Shape(100, 2, 5, lengths=(100, 40)))
    before = mx.get_active_memory()
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.cache, scale=case.scale, plan=plan, return_lse=True
    )
    assert mx.get_active_memory() - before < 256  # constants
    mx.eval(out, lse)
    assert mx.get_active_memory() - before >= out.nbytes + lse.nbytes


def test_a_back_end_runs_what_it_does_not_refuse() -> None:
    case = make_case(Shape(100, 2, 5, "float32"))
    lengths, starts = case.shape.all_lengths, (0, 0)
    call = backends.Call(
        *(case.q_nope, case.q_pe, case.cache, case.scale, case.shape, lengths, starts), 1, True
    )
    for plan in (MLX, Plan("mlx_rows")):
        out, lse = MlxBackend("metal").run(plan, call)
        assert check(case, out, lse, plan).ok
