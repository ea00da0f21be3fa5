"""Tables fetched from a team's server, and sent to it. Standard library only.

Whatever a server does, the answer is a value or one line: nothing it sends is believed unread.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from ..errors import ShareError

TIMEOUT_S = 30.0  # from connecting to the last byte
MAX_BYTES = 64 << 20  # of an answer: a table of a hundred thousand buckets is smaller
PLACE = "/-/tuning"  # of what a server offers, below its address
_CHUNK = 1 << 16

Value = TypeVar("Value")


def fetch(url: str, family: str, kernel: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """The text of a family's table: what was measured with the kernels of this digest.

    Raises:
        ShareError: one line that names the server and says what it did.
    """
    address = f"{_address(url)}{PLACE}/tables/{quote(family)}.json?kernel={quote(kernel)}"
    status, body = _ask(Request(address), timeout_s)
    if status != 200:
        raise _refused(url, status, body)
    try:
        return body.decode("utf-8")
    except ValueError as error:
        raise ShareError(f"{_name(url)} answered with garbage: not UTF-8 text") from error


def send(url: str, text: str, token: str, *, timeout_s: float = TIMEOUT_S) -> Mapping[str, int]:
    """Add a table to those of the server: how much of it was `new` there and how much `known`.

    Raises:
        ShareError: one line that names the server and says what it did; never the token.
    """
    if not re.fullmatch(r"[!-~]+", token):
        raise ShareError("that is no token: it is empty, or holds spaces or what can't be printed")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    address = f"{_address(url)}{PLACE}/push"
    status, body = _ask(Request(address, text.encode(), headers, method="POST"), timeout_s)
    if status in (401, 403):
        raise ShareError(f"{_name(url)} refused the token: {_reason(body) or status}")
    if status != 200:
        raise _refused(url, status, body)
    try:
        answer = json.loads(body)
        return {name: int(answer[name]) for name in ("new", "known")}
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ShareError(f"{_name(url)} answered with garbage, not what it stored") from error


# --- inside ------------------------------------------------------------------------------------


class _NoRedirects(HTTPRedirectHandler):
    """A token goes to the address that it was given for, and nowhere else."""

    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None


class _Early:
    """A server may refuse what it has not read to its end: then its answer counts."""

    def do_open(self, http_class: Any, req: Request, **named: Any) -> Any:
        class Connection(http_class):  # type: ignore[misc]
            def send(self, data: Any) -> None:
                try:
                    super().send(data)
                except (BrokenPipeError, ConnectionResetError):
                    if self.sock is None:
                        raise

        return super().do_open(Connection, req, **named)  # type: ignore[misc]


class _Http(_Early, HTTPHandler):
    pass


class _Https(_Early, HTTPSHandler):
    pass


_opener = build_opener(_NoRedirects, _Http, _Https)


def _ask(request: Request, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of an answer, whatever the status."""
    name = _name(request.full_url)
    try:
        return _in_time(lambda: _answer(request, timeout_s), timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            raise ShareError(f"{name} did not answer within {timeout_s:g} s") from error
        if isinstance(error, URLError):
            why = getattr(reason, "strerror", None) or reason
            raise ShareError(f"{name} can't be reached: {why}") from error
        raise ShareError(f"{name} answered with garbage: {reason!r}"[:200]) from error


def _in_time(action: Callable[[], Value], timeout_s: float) -> Value:
    """What an action gives, or TimeoutError.

    A socket's own timeout is that of one read: a server that sends a byte a second, in its headers
    too, would never meet it. The thread that is left behind ends with the process.
    """
    done: Future[Value] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except Exception as error:
            done.set_exception(error)

    thread = Thread(target=act, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not done.done():
        raise TimeoutError
    return done.result()


def _answer(request: Request, timeout_s: float) -> tuple[int, bytes]:
    try:
        answer = _opener.open(request, timeout=timeout_s)
    except HTTPError as error:
        answer = error  # it has a body like any other
    status = answer.status or 0
    with answer:
        try:
            return status, _read(answer)
        except (http.client.IncompleteRead, ConnectionResetError):
            if status < 400:
                raise
            return status, b""  # refused early, and the reason is lost


def _read(answer: Any) -> bytes:
    found = bytearray()
    while chunk := answer.read1(_CHUNK):
        found += chunk
        if len(found) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MB")
    missing = answer.length  # of what its header promised; None: it promised nothing
    if missing:
        raise http.client.IncompleteRead(bytes(found[-9:]), missing)
    return bytes(found)


def _address(url: str) -> str:
    """A server's address; that of its page will do. Raises ShareError: it is none."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    plain = re.fullmatch("[!-~]+", url)
    if not known or parts.query or parts.fragment or "@" in parts.netloc or not plain:
        raise ShareError("the address of a server is http://HOST:PORT or https://HOST")
    return url.rstrip("/").removesuffix(PLACE)


def _name(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _refused(url: str, status: int, body: bytes) -> ShareError:
    phrase = http.client.responses.get(status, "which nobody knows")
    reason = _reason(body) or f"it answered with status {status}, {phrase}"
    return ShareError(f"{_name(url)}: {reason}")


def _reason(body: bytes) -> str:
    """The `error` of an answer in JSON as one printable line; "" without any."""
    try:
        text = json.loads(body)["error"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    line = "".join(each for each in line if each.isprintable())[:300]
    return "" if line.isdigit() else line  # Datasette gives the status again
