"""An object that lives in a Python process of its own, and is called from here."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any

from .errors import DeviceError

HANG_S = 600.0  # for one answer: no plan that is worth timing takes as long
_HEAD = 8  # bytes of a message's length
# The path first: the folder that the command was started in may hold files with any name.
_CODE = "import sys; sys.path[:] = {path!r}; from mla_tuner.worker import serve; serve()"


class _EndedError(Exception):
    """The other end of the pipe is gone. Never one of the object's own exceptions."""


class Worker:
    """Makes `make(*args)` in a new process at the first call, and again at the first after a death.

    make, args and what methods take and return must be picklable. The process ends with `close`, or
    when this one ends, however that happens. What it prints on stdout goes nowhere; its last line
    on stderr explains a death. An answer that takes longer than `hang_s` seconds is not waited for.
    """

    def __init__(
        self, name: str, make: Callable[..., object], *args: object, hang_s: float = HANG_S
    ) -> None:
        self.name = name  # for messages: "the process of the duel"
        self.hang_s = hang_s
        self._made_of = (make, args)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs now."""
        return self._process is not None and self._process.poll() is None

    def call(self, method: str, *args: object) -> Any:
        """What `method` of the object returns; what it raises is raised here.

        Raises:
            DeviceError: the process died in this call, or gave no answer; one line says so.
        """
        if not self.alive:
            self.close()  # a death since the last call is not this one's
            self._start()
        return self._ask((method, args))

    def close(self) -> None:
        """Ends the process, whatever it does: it has nothing to save."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> None:
        code = _CODE.format(path=[str(each) for each in sys.path])
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the other
            )
            self._ask(self._made_of)
        except BaseException:
            self.close()  # without an object it is of no use
            raise

    def _ask(self, question: tuple[object, object]) -> Any:
        message = pickle.dumps(question)  # nothing is sent yet: a failure leaves the process be
        try:
            done, value = pickle.loads(self._exchange(message))
        except BaseException:
            self.close()  # what is left in the pipe would be taken for the next answer
            raise
        if not done:
            raise value
        return value

    def _exchange(self, message: bytes) -> bytes:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()
        limit = threading.Timer(self.hang_s, _give_up, (self._process, late))
        limit.daemon = True
        limit.start()
        try:
            _write(self._process.stdin, message)
            return _read(self._process.stdout)
        except _EndedError as error:
            if late.is_set():
                text = f"{self.name} gave no answer in {self.hang_s:g} s"
                raise DeviceError(text) from error
            raise DeviceError(self._obituary()) from error
        finally:
            limit.cancel()

    def _obituary(self) -> str:
        """What the process died of."""
        assert self._process is not None
        assert self._errors is not None
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            code = 0
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.name} died ({cause})" + "".join(f": {line[:160]}" for line in words)


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


# --- in the new process ------------------------------------------------------------------------


def serve() -> None:
    """Answers calls until stdin ends. Never returns."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's words must not get between the answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    questions: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(inbox, questions), daemon=True).start()
    target: object = None
    while True:
        try:
            what, args = pickle.loads(questions.get())
            if callable(what):
                target, value = what(*args), None
            else:
                value = getattr(target, what)(*args)
            answer = pickle.dumps((True, value))
        except Exception as error:  # for the caller to judge
            answer = _failure(error)
        _write(outbox, answer)


def _listen(inbox: IO[bytes], questions: SimpleQueue[bytes]) -> None:
    """Reads on while a call runs: when the other end is gone, so is the reason to finish it."""
    code = 0
    try:
        while True:
            questions.put(_read(inbox))
    except _EndedError:
        pass
    except BaseException as error:  # nobody would ever answer
        code = 1
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _failure(error: Exception) -> bytes:
    """The exception itself, or its text where it can't be sent."""
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:  # whatever its class makes of that
        answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer


# --- messages ----------------------------------------------------------------------------------


def _write(stream: IO[bytes], message: bytes) -> None:
    try:
        stream.write(len(message).to_bytes(_HEAD, "little") + message)
        stream.flush()
    except OSError as error:  # the other end is closed
        raise _EndedError from error


def _read(stream: IO[bytes]) -> bytes:
    try:
        head = stream.read(_HEAD)
        size = int.from_bytes(head, "little")
        message = stream.read(size)
    except OSError as error:
        raise _EndedError from error
    if len(head) < _HEAD or len(message) < size:
        raise _EndedError
    return message
