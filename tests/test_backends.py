"""Loading the native kernel safely, what each back end offers, and MLX's own paths."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mla_tuner
from mla_tuner import backends, mla_decode
from mla_tuner.backends import cpu, mlx_paths, self_check
from mla_tuner.backends import native as loading
from mla_tuner.backends.cpu import CpuBackend
from mla_tuner.cases import check, make_case
from mla_tuner.device import usable_cores
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import DTYPES, Shape

INSTALLED = vars(mx)["__version__"]
SHAPE = Shape(300, 1, 16)


def native() -> Any:
    from mla_tuner import _native

    return _native


class FakeNative:
    """Stands for `_native` where its absence or its faults are the point."""

    __spec__ = SimpleNamespace(origin=None)  # from no file

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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("metal", "no Metal device is here"),
        ("cuda", f"this MLX ({INSTALLED}) has no CUDA back end"),
    ],
)
def test_a_back_end_without_kernels_says_so(name: str, reason: str) -> None:
    if getattr(mx, name).is_available():
        pytest.skip(f"this MLX has a {name} back end")
    backend = backends.get(name)
    assert backend.available() == backend.self_check() == (False, reason)
    assert backend.refusal(Plan("split", 2), SHAPE) == reason
    assert backend.refusal(MLX, SHAPE) is backend.refusal(Plan("mlx_rows"), SHAPE) is None
    assert backend.tiles(SHAPE) == ()
    assert (backend.executed(1), backend.detail(1)) == (None, {})


@pytest.mark.parametrize("name", backends.NAMES)
def test_a_signature_tells_dtypes_and_shapes(name: str) -> None:
    signature, a = backends.get(name).signature, mx.zeros((2, 3))
    assert signature(a, None) == signature(mx.ones((2, 3)), None)
    half, turned, row = a.astype(mx.float16), a.T, mx.zeros(3)
    others = [(a,), (None, a), (a, a), (half, None), (turned, None), (row, a), (a, row)]
    assert len({signature(*arrays) for arrays in [(a, None), *others]}) == 1 + len(others)
    for wrong in ([1.0], 3, "a", a.shape):
        with pytest.raises(TypeError, match="expected arrays or None"):
            signature(a, wrong)  # type: ignore[arg-type]


def test_tickets_are_unique() -> None:
    assert len({backends.next_ticket() for _ in range(100)}) == 100


# --- the CPU kernel


@pytest.mark.usefixtures("kernel")
def test_the_kernel_is_built_and_right() -> None:
    backend = backends.get("cpu")
    assert backend.available() == (True, "")
    assert backend.self_check() == (True, "the CPU kernel agrees with mlx_rows")
    assert len(backend.digest()) == 16


@pytest.mark.usefixtures("kernel")
def test_tiles_start_with_the_default() -> None:
    tiles = backends.get("cpu").tiles
    found = {n: tiles(Shape(300, 1, n)) for n in (1, 16, 20, 64, 65, 128)}
    assert found | {1024: tiles(Shape(300, 1, 128, q_len=8))} == {
        1: ("r16",),
        16: ("r16",),
        20: ("r32", "r16"),
        64: ("r64", "r16", "r32"),
        65: ("r64", "r16", "r32", "r128"),
        128: ("r64", "r16", "r32", "r128"),
        1024: ("r64", "r16", "r32", "r128"),
    }


@pytest.mark.usefixtures("kernel")
def test_refusals_name_the_tiles() -> None:
    backend = backends.get("cpu")
    # A stored plan's bucket rounds q_len, so a tile larger than the rows must stay legal.
    for plan in (MLX, Plan("single"), Plan("split", 64, "r128"), Plan("single", 1, "r16")):
        assert backend.refusal(plan, Shape(0, 1, 1)) is None
    refusal = backend.refusal(Plan("single", 1, "q8"), SHAPE)
    assert refusal == "the CPU kernel's tiles are r16, r32, r64, r128"


@pytest.mark.usefixtures("kernel")
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
    if tile in backends.get("cpu").tiles(Shape(300, 1, heads)):
        assert found.executed == plan


@pytest.mark.usefixtures("kernel")
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
    bad = ("0", "-1", "1025", "99999999999", "9" * 5000, "2.5", "1e3", "two", " 3", "²", "\uff13")
    good = {"1": 1, "3": 3, "003": 3, "1024": 1024}
    for text, count in good.items() | {(text, usable_cores()) for text in ("", *bad)}:
        caplog.clear()
        monkeypatch.setenv("MLA_TUNER_THREADS", text)
        fake = FakeNative()
        assert install(monkeypatch, fake).available() == (True, "")
        assert fake.count == count
        if text in bad:
            (line,) = caplog.messages
            assert line.startswith("MLA_TUNER_THREADS='")
            assert line.endswith("' is not in 1..1024: ignored")
            assert len(line) < 100
        else:
            assert caplog.records == []


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
    assert (backend.digest(), backend.tiles(SHAPE), backend.executed(1)) == ("", (), None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package's folder that is searched for what the build makes, before the real one."""
    for name in ("mla_tuner._build_info", "mla_tuner._native"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [m for m in sys.meta_path if "skbc" not in str(type(m))])
    monkeypatch.setattr(mla_tuner, "__path__", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MLX_VERSION = ",
        "\0",
        "1 / 0",
        "raise RuntimeError('two\\nlines')",
        "MLX_VERSION = None",
        f"MLX_VERSION = {INSTALLED!r}",
        "KERNEL_DIGEST = 'feed'",
    ],
    ids=repr,
)
def test_a_broken_build_is_one_warning(
    text: str, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty, half written: the file beside the binary may be anything."""
    (sources / "_build_info.py").write_text(text)
    assert_only_mlx(CpuBackend(), caplog, "the CPU kernel is not built (for MLX ")


@pytest.mark.parametrize("error", [ModuleNotFoundError, FileNotFoundError, OSError, KeyError])
def test_whatever_an_import_raises_is_one_warning(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An editable install raises FileNotFoundError where a file is gone."""

    def fail(name: str) -> Any:
        raise error(f"no {name}")

    monkeypatch.setattr(loading, "import_module", fail)
    assert_only_mlx(CpuBackend(), caplog, "the CPU kernel is not built (for MLX ")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library at all" * 10])
def test_a_broken_binary_is_one_warning(
    content: bytes, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = f"MLX_VERSION = {INSTALLED!r}\nKERNEL_DIGEST = 'feed'\n"
    (sources / "_build_info.py").write_text(info)
    (sources / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    assert_only_mlx(CpuBackend(), caplog, f"the CPU kernel, built for MLX {INSTALLED}, does not")


@pytest.mark.usefixtures("kernel")
@pytest.mark.skipif(sys.platform != "linux", reason="other loaders look at the length themselves")
@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.9999])
def test_a_binary_that_was_cut_short_is_never_loaded(
    part: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """In this process: loading it would end it with SIGBUS."""
    whole = Path(native().__file__).read_bytes()
    request.getfixturevalue("sources")
    info = f"MLX_VERSION = {INSTALLED!r}\nKERNEL_DIGEST = 'feed'\n"
    (tmp_path / "_build_info.py").write_text(info)
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(whole[: int(len(whole) * part)])
    assert_only_mlx(CpuBackend(), caplog, "is cut short")


def assert_only_mlx(backend: CpuBackend, caplog: pytest.LogCaptureFixture, words: str) -> None:
    able, reason = backend.available()
    assert not able
    assert words in reason
    assert "make setup" in reason
    assert "\n" not in reason
    assert (backend.digest(), backend.tiles(SHAPE), backend.executed(1)) == ("", (), None)
    assert backend.self_check() == (False, reason)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text


def test_threads_that_come_together_get_one_back_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one warning."""
    monkeypatch.setattr(backends, "_make", cache(backends._make.__wrapped__))
    monkeypatch.setattr(backends, "get", cache(backends.get.__wrapped__))
    load = cpu.load
    gate = threading.Barrier(8)

    def slow(prepare: Callable[[Any], object]) -> loading.Native:
        time.sleep(0.01)  # lets the others in, were they not held
        return load(prepare)

    monkeypatch.setattr(cpu, "load", slow)
    monkeypatch.setitem(sys.modules, "mla_tuner._build_info", None)  # type: ignore[arg-type]
    found = []

    def ask() -> None:
        gate.wait()
        backend = backends.get("cpu")
        found.append((backend, backend.refusal(Plan("single"), SHAPE)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(caplog.records) == 1


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
    assert done.stdout.startswith("mlx | the CPU kernel is not built")
    assert done.stderr.count("the CPU kernel is not built") == 1


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("None", "is not built ("),
        ("SimpleNamespace(MLX_VERSION='0.1', KERNEL_DIGEST='feed')", "was built for MLX 0.1, but "),
    ],
)
def test_the_command_plan_says_why_there_is_no_kernel(build: str, words: str) -> None:
    """For every shape, and first."""
    code = f"""
import sys; from types import SimpleNamespace
sys.modules["mla_tuner._build_info"] = {build}
from mla_tuner.cli import main
for shape in ("2k", "32k", "0", "1024m", "64k --batch 64", "32k --q-len 8", "8k --layout dense"):
    main(f"plan --json --heads 16 --context {{shape}}".split(), standalone_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count(f'"reason": "the CPU kernel {words}') == 7, done.stdout
    assert done.stdout.count("make setup") == 7
    assert done.stderr.count("only the mlx paths run") == 1


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
            "LSE in bits": (out, None if lse is None else lse / 0.6931472),
        }.get(change, (out, lse))

    return FakeNative(mla_decode=decode, last_run=native().last_run)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("zeros", "asked for single, None ran"),  # without an LSE nothing evaluates the call
        ("NaN", "is wrong by nan"),
        ("LSE in bits", "LSE by"),
        ("never splits", "asked for split x3, single r64 ran"),
        ("raises", "RuntimeError: no memory"),
    ],
)
def test_the_self_check_finds(change: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = install(monkeypatch, broken(change))
    passed, reason = backend.self_check()
    assert not passed
    assert message in reason
    assert backend.self_check() == (passed, reason)


def test_the_self_check_compares_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's GPUs may multiply float32 as TF32: off by 4e-4, which no right kernel agrees with."""
    streams: list[object] = []
    inside: list[object] = []

    @contextmanager
    def stream(device: object) -> Iterator[None]:
        streams.append(device)
        yield
        streams.pop()

    def run_mlx_rows(call: backends.Call) -> Any:
        inside.append(list(streams))
        assert call.q_nope.dtype == mx.float32
        return mlx_paths.run_mlx_rows(call)

    monkeypatch.setattr(mx, "stream", stream)
    monkeypatch.setattr(self_check, "run_mlx_rows", run_mlx_rows)
    backend: Any = SimpleNamespace(run=lambda plan, call: mlx_paths.run_mlx_rows(call))
    backend.executed = lambda ticket: Plan("split", 3)
    for dtype in DTYPES:
        assert self_check.fault(backend, Plan("split", 3), dtype) is None
    assert inside == [[mx.cpu]] * 2 * len(DTYPES)


def test_no_two_proofs_share_their_numbers() -> None:
    """Memory may still hold the right answer of another one, as of that without an LSE."""
    seen: list[tuple[int, bool]] = []

    def run(plan: Plan, call: backends.Call) -> Any:
        seen.append((hash(np.array(call.q_nope.astype(mx.float32)).tobytes()), call.want_lse))
        return mlx_paths.run_mlx_rows(call)

    backend: Any = SimpleNamespace(run=run, executed=lambda ticket: Plan("split", 3))
    for want_lse in (False, True):
        assert self_check.fault(backend, Plan("split", 3), "bfloat16", want_lse=want_lse) is None
    assert [lse for _, lse in seen] == [False, False, False, True]
    assert len({numbers for numbers, _ in seen}) == 4


@pytest.mark.usefixtures("kernel")
def test_the_self_check_leaves_no_trace_in_random_numbers() -> None:
    mx.random.seed(3)
    want = mx.random.normal((4,))
    mx.random.seed(3)
    assert CpuBackend().self_check()[0]
    assert mx.array_equal(mx.random.normal((4,)), want)


def test_the_self_check_bounds_match_its_dtypes() -> None:
    assert set(DTYPES) == set(self_check._BOUND)
