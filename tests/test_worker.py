"""A process of its own: what crosses over, what it dies of, and what it leaves alone."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

import pytest

from mla_tuner import worker as workers
from mla_tuner.errors import DeviceError
from mla_tuner.worker import Worker

TESTS = Path(__file__).parent


class StrangeError(Exception):
    """Can't be sent: its copy needs arguments that pickle does not keep."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("strange")


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def shout(self) -> str:
        print("on stdout", flush=True)
        os.write(1, b"past Python's own stdout")
        return sys.stdin.read()

    def fail(self, strange: bool) -> None:
        raise StrangeError(1, 2) if strange else ValueError("no such plan")

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def leave(self) -> None:
        os.write(2, b"Traceback\nlibmlx: out of memory\n\n")
        os._exit(3)

    def raise_(self, error: Exception) -> None:
        raise error

    def never(self) -> None:
        signal.pause()


def make(start: int) -> Counter:
    return Counter(start)


def refuse() -> Counter:
    raise MemoryError("no room")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("the process of the duel", make, 40)
    yield worker
    worker.close()


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_calls_go_to_one_object_in_another_process(worker: Worker) -> None:
    assert [worker.call("add", 1), worker.call("add", 1)] == [41, 42]
    pid = worker.call("pid")
    assert pid not in (os.getpid(), os.getppid())
    worker.close()
    assert not alive(pid)
    worker.close()  # once is enough, twice does no harm


def test_its_environment_is_this_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    assert worker.call("env", "MLA_TUNER") == "off"


def test_what_it_prints_is_not_taken_for_an_answer(worker: Worker, capfd) -> None:
    assert worker.call("shout") == ""
    assert worker.call("add", 2) == 42
    assert capfd.readouterr() == ("", "")


def test_what_it_raises_is_raised_here(worker: Worker) -> None:
    with pytest.raises(ValueError, match="no such plan"):
        worker.call("fail", False)
    with pytest.raises(RuntimeError, match="StrangeError: strange"):
        worker.call("fail", True)
    with pytest.raises(AttributeError):
        worker.call("nothing")
    assert worker.call("add", 2) == 42


def test_what_making_it_raises_is_raised_here() -> None:
    with closing(Worker("it", refuse)) as worker:
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room"):
                worker.call("add", 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_its_death_is_one_line_and_the_next_call_starts_another(
    worker: Worker, number: int
) -> None:
    first = worker.call("pid")
    with pytest.raises(DeviceError) as death:
        worker.call("die", number)
    assert str(death.value) == f"the process of the duel died (signal {int(number)})"
    assert worker.call("add", 1) == 41
    assert worker.call("pid") != first


def test_a_death_between_calls_is_not_the_next_call_s(worker: Worker) -> None:
    first = worker.call("pid")
    os.kill(first, signal.SIGKILL)
    assert worker._process is not None
    worker._process.wait()
    assert not worker.alive
    assert worker.call("add", 1) == 41
    assert worker.call("pid") != first


@pytest.mark.parametrize("error", [EOFError("end of file"), BrokenPipeError(32, "of its own")])
def test_its_own_errors_are_not_taken_for_a_death(worker: Worker, error: Exception) -> None:
    worker.call("add", 1)
    with pytest.raises(type(error), match=str(error.args[-1])):
        worker.call("raise_", error)
    assert worker.call("add", 1) == 42  # the same object


def test_what_never_answers_is_ended(worker: Worker) -> None:
    first = worker.call("pid")
    worker.hang_s = 0.05
    with pytest.raises(DeviceError) as end:
        worker.call("never")
    assert str(end.value) == "the process of the duel gave no answer in 0.05 s"
    assert not alive(first)
    worker.hang_s = workers.HANG_S
    assert worker.call("add", 1) == 41


def test_an_answer_that_could_not_be_read_is_not_the_next_one_s(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stream: IO[bytes]) -> bytes:
        stream.read(workers._HEAD)
        raise MemoryError

    worker.call("add", 1)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_read", full)
        with pytest.raises(MemoryError):
            worker.call("add", 1)
    assert not worker.alive
    assert worker.call("add", 2) == 42


def test_a_question_that_cannot_be_sent_leaves_it_be(worker: Worker) -> None:
    worker.call("add", 1)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        worker.call("add", lambda: 1)
    assert worker.call("add", 1) == 42


def test_its_last_words_are_told(worker: Worker) -> None:
    with pytest.raises(DeviceError) as death:
        worker.call("leave")
    cause = "exit code 3): libmlx: out of memory"
    assert str(death.value) == f"the process of the duel died ({cause}"


def test_files_beside_the_command_do_not_get_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('wrong pickle')")
    monkeypatch.chdir(tmp_path)
    assert worker.call("add", 2) == 42


def test_an_interrupt_ends_it(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = worker.call("pid")
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            worker.call("never")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not alive(pid)
    assert worker.call("add", 2) == 42


def test_it_dies_with_this_process_even_in_the_middle_of_a_call() -> None:
    """Started from `python -c`, killed by SIGKILL: nobody is left to close anything."""
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from test_worker import Worker, make\n"
        "worker = Worker('it', make, 1)\n"
        "print(worker.call('pid'), flush=True)\n"
        "worker.call('never')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        parent.kill()
    if fd is None:
        pytest.skip("this system has no pidfd_open")
    import select

    ended, _, _ = select.select([fd], [], [], 30.0)
    os.close(fd)
    assert ended
