"""The clock of the GPU and the head start, without a GPU: launches are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from launches import raising

from mla_tuner.backends import head_start as module
from mla_tuner.backends.head_start import LONGEST_S, HeadStart, Stamp, head_start
from tools.nvrtc import Compiled, Nvrtc, find, recorded


def stamp(began_s: float, ended_s: float) -> Stamp:
    return Stamp(*[mx.array([round(each * 1e9)], mx.uint64) for each in (began_s, ended_s)])


class Gpu:
    """Launches that wait as long as they are told, and one second passes between two of them."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 1.0, late_s
        self.waits: list[float] = []

    def __call__(self, wait_s: float, after: mx.array) -> Stamp:
        assert after.dtype == mx.uint16
        self.waits.append(wait_s)
        return self.stamp(wait_s)

    def stamp(self, wait_s: float) -> Stamp:
        began_s, ended_s = self.now_s, self.now_s + wait_s + self.late_s
        self.now_s = ended_s + 1.0
        return stamp(began_s, ended_s)


class Queue(Gpu):
    """The head start is launched last, and comes first."""

    def stamp(self, wait_s: float) -> Stamp:
        began_s = {0.0: 5.0}.get(wait_s, 2.0)
        return stamp(began_s, began_s + wait_s)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's clock: 10 ms pass from one look to the next."""
    times = iter(range(1000))
    monkeypatch.setattr(module, "perf_counter", lambda: next(times) * 0.01)
    return iter(())


@pytest.mark.usefixtures("ticks")
def test_time_counts_from_the_end_of_the_head_start_to_the_end_of_the_chain() -> None:
    gpu = Queue()
    timed = HeadStart(gpu).time(mx.zeros((2, 3), mx.bfloat16), 0.02)
    assert timed.gpu_s == pytest.approx(5.0 - 2.02)
    assert gpu.waits == [0.0, 0.02]
    assert timed.host_s == pytest.approx(0.01)
    assert timed.ahead


@pytest.mark.usefixtures("ticks")
def test_a_host_that_took_longer_than_the_head_start_was_not_ahead() -> None:
    timed = HeadStart(Queue()).time(mx.zeros((4,), mx.float32), 0.005)
    assert not timed.ahead


@pytest.mark.usefixtures("ticks")
def test_no_head_start_is_longer_than_the_kernel_may_wait() -> None:
    gpu = Queue()
    HeadStart(gpu).time(mx.zeros((4,), mx.float16), 10.0)
    assert gpu.waits[-1] == LONGEST_S == 0.05


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize(
    ("late_s", "fault"),
    [
        (0.0, ""),
        (0.005, ""),
        (-0.0005, "0.001 s are 0.0005 s by the GPU, 0.01 s by the host"),
        (0.1, "0.001 s are 0.101 s by the GPU, 0.01 s by the host"),
    ],
)
def test_a_clock_that_is_wrong_is_found_out(late_s: float, fault: str) -> None:
    """One that stands still or runs too slow ends no wait in time, one too fast takes too long."""
    assert HeadStart(Gpu(late_s)).fault() == fault


@pytest.mark.parametrize("backend", ["cpu", "metal"])
def test_only_cuda_has_one(backend: str) -> None:
    assert head_start(backend) is None


def test_a_kernel_that_does_not_compile_leaves_plain_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_compiled", lambda: raising(RuntimeError("no compiler")))
    assert head_start("cuda") is None


def test_a_wrong_clock_leaves_plain_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", lambda: Gpu(-5e-4))
    assert head_start("cuda") is None


@pytest.mark.usefixtures("ticks")
def test_a_right_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", Gpu)
    assert head_start("cuda") is not None


# --- the kernel ---------------------------------------------------------------------------------


def launched(wait_s: float) -> Any:
    with recorded() as found:
        module._compiled()(wait_s, mx.zeros((8,), mx.uint16))
    return found[0]


def test_one_thread_waits() -> None:
    kernel = launched(1e-3)
    assert (kernel.grid, kernel.threadgroup, kernel.inputs) == (
        (1, 1, 1),
        (1, 1, 1),
        ("wait_us", "after"),
    )


def test_the_text_bounds_the_wait_by_two_clocks() -> None:
    """A GPU that never comes back would take the machine with it."""
    text = launched(1e-3).text
    assert f"longest_us={LONGEST_S * 1e6:.0f};" in text
    assert "clock64()-cycle<longest_cycles" in text


def test_the_clock_is_read_before_all_memory() -> None:
    """A page that has to come from the host would be waited for first, and timed."""
    text = launched(0.0).text
    read = text.index("globaltimer")
    assert all(text.index(each) > read for each in ("wait_us[0]", "began[0]", "ended[0]"))
    assert text.count(':"=l"(started)::"memory");') == text.count(':"=l"(now)::"memory");') == 1


def test_what_is_written_is_what_was_read() -> None:
    text = launched(0.0).text
    assert "unsigned long* began, unsigned long* ended)" in text
    assert text.index("began[0]=started;") < text.index("do{") < text.index("ended[0]=now;")


def test_the_host_reads_arrays_of_8_bytes_alone() -> None:
    """MLX moves larger ones to the host, and the GPU has to fetch their memory again, by faults."""
    with recorded():
        stamped = module._compiled()(0.0, mx.zeros((8,), mx.uint16))
    assert [each.nbytes for each in stamped] == [8, 8]


def test_the_text_compiles() -> None:
    library = find()
    if library is None:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    kernel = launched(1e-3)
    compiled = Nvrtc(library).compile(kernel.text, kernel.name, "sm_80")
    assert isinstance(compiled, Compiled)
    assert compiled.spill_bytes == 0
