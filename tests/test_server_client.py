"""Pulling from servers and pushing to them: what goes wrong is one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import answer, error, run
from fakes import FakeBackend
from server_tables import CPU, KERNEL, SECRET, fill, repeated, running, runs_in, table, token

from mla_tuner import backends, share
from mla_tuner import device as devices
from mla_tuner.device import Device
from mla_tuner.errors import ShareError
from mla_tuner.server import client
from mla_tuner.store import Store

SECRET_TOKEN = "dstok_this-is-nobody's-business"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the simulated CPU; no proxy stands between it and the loopback."""
    monkeypatch.setattr(devices, "probe", lambda choice: CPU)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(kernel=KERNEL))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def answering(say: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every request with `say`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            say(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            say(self)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def saying(body: bytes, status: int = 200, **headers: str) -> Callable[[Any], None]:
    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return say


def dropping(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


def dripping(start: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Says how an answer starts, then a byte now and then, far beyond a client's timeout."""

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        never = threading.Event()
        for _ in range(50):
            with suppress(OSError):
                handler.wfile.write(b"0")
            never.wait(0.02)

    return say


def refusals(url: str, *more: str) -> list[str]:
    """What pull and push say; neither names the token."""
    db = fill(_database(), (1024,))
    before = db.read_bytes()
    said = [
        error("share", "pull", url, *more),
        error("share", "push", url, "--token", SECRET_TOKEN, *more),
    ]
    assert db.read_bytes() == before
    assert SECRET_TOKEN not in " ".join(said)
    return said


def _database() -> Path:
    return Path(os.environ["MLA_TUNER_DB"])


# --- with a real server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("datasette", reason="datasette is not installed")
    with running(tmp_path_factory.mktemp("server")) as url:
        yield url


def test_what_one_machine_pushes_another_pulls(server: str, tmp_path: Path) -> None:
    mine, theirs = fill(tmp_path / "mine.db"), tmp_path / "theirs.db"
    file = tmp_path / "token"
    file.write_text(token() + "\n")
    push = ("share", "push", server, "--token-file", str(file), "--db", str(mine))
    assert answer(*push)["families"] == {CPU.family: {"new": 2, "known": 0}}
    assert run(*push).stdout == f"{CPU.family}: 0 new results, 2 known there\n"
    pulled = answer("share", "pull", server, "--db", str(theirs))
    assert (pulled["family"], pulled["runs"], pulled["buckets"]) == (CPU.family, 1, 2)
    with Store(mine) as a, Store(theirs) as b:
        assert [row.plan for row in a.plans()] == [row.plan for row in b.plans()]
    again = run("share", "pull", f"{server}{client.PLACE}/", "--db", str(theirs))
    assert f"{CPU.family}: 0 buckets added, 2 known already" in again.stdout


def test_two_pushes_at_once_lose_nothing(server: str, tmp_path: Path) -> None:
    first, secret = table(tmp_path, 4096), token()
    made = [repeated(first, number) for number in range(8)]
    threads = [
        threading.Thread(target=client.send, args=(server, share.render(each), secret))
        for each in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = share.load(client.fetch(server, CPU.family, KERNEL), "left")
    assert runs_in(left) >= set().union(*map(runs_in, made))


def test_a_wrong_token_is_said_and_not_shown(server: str, tmp_path: Path) -> None:
    fill(tmp_path / "t.db")
    for wrong in (SECRET_TOKEN, "x"):
        said = error("share", "push", server, "--token", wrong, "--db", str(tmp_path / "t.db"))
        assert f"{server} refused the token: " in said
        assert SECRET_TOKEN not in said


def test_other_kernels_are_not_pulled(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client.send(server, share.render(table(_database().parent)), token())
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(kernel="f" * 16))
    said = error("share", "pull", server)
    assert said == f"{server}: {CPU.family} was measured with the kernels {KERNEL} only"
    assert not _database().exists()


# --- with servers that fail ----------------------------------------------------------------------


def test_a_server_that_is_down(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert (
        refusals(f"http://127.0.0.1:{port}")
        == [f"http://127.0.0.1:{port} can't be reached: Connection refused"] * 2
    )


def test_a_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert refusals(url, "--timeout", "0.1s") == [f"{url} did not answer within 0.1 s"] * 2


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_a_server_that_never_ends(start: bytes) -> None:
    with answering(dripping(start)) as url:
        assert refusals(url, "--timeout", "0.1s") == [f"{url} did not answer within 0.1 s"] * 2


@pytest.mark.parametrize(
    ("say", "texts"),
    [
        (dropping, ["answered with garbage: BadStatusLine"] * 2),
        (saying(b"<html>hello"), ["not JSON", "answered with garbage, not what it stored"]),
        (saying(b"\xff\xfe"), ["answered with garbage: not UTF-8 text", "garbage, not what"]),
        (saying(b"[" * 100_000), ["not JSON", "garbage, not what"]),
        (saying(b"{}"), ["version: Field required", "garbage, not what"]),
        (saying(b"{", 413, Content_Length="9"), ["status 413"] * 2),
        (saying(b"{", Content_Length="9"), ["answered with garbage: IncompleteRead"] * 2),
        (saying(b"", 404), ["it answered with status 404, Not Found"] * 2),
        (saying(b"", 418), ["it answered with status 418"] * 2),
        (saying(b'{"error": "full\\n\\u001b[31m"}', 503), [": full [31m"] * 2),
        (saying(b'{"error": 7}', 500), ["status 500, Internal Server Error"] * 2),
        (saying(b'{"error": "404"}', 404), ["it answered with status 404, Not Found"] * 2),
        (saying(b'{"new": 1e999, "known": 0}'), ["version: Field required", "garbage, not what"]),
        (saying(b'{"new": ' + b"9" * 5000 + b"}"), ["not JSON", "garbage, not what"]),
        (saying(b"", 302, Location="http://127.0.0.1:9/"), ["status 302, Found"] * 2),
        (saying(b'{"error": "no"}', 403), [": no", "refused the token: no"]),
        (saying(b'{"error": "only reads"}', 401), [": only", "refused the token: only reads"]),
    ],
)
def test_a_server_that_answers_garbage(say: Any, texts: list[str]) -> None:
    with answering(say) as url:
        for said, text in zip(refusals(url), texts, strict=True):
            assert said.startswith(url)
            assert text in said
            assert said.isprintable()


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 1 << 20)
    with answering(saying(b" " * (2 << 20))) as url:
        assert all("garbage: ValueError('more than 1 MB')" in said for said in refusals(url))


def test_a_refusal_counts_before_all_is_sent() -> None:
    """Servers refuse a large table, or a token, without reading what else is sent."""

    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ShareError, match="it answered with status 413"):
            client.send(url, " " * (16 << 20), SECRET_TOKEN)
        thread.join()


def test_a_token_is_not_given_to_where_a_server_points(tmp_path: Path) -> None:
    asked: list[str] = []
    with answering(lambda handler: asked.append(handler.path)) as other:
        moved = saying(b"", 307, Location=f"{other}/-/tuning/push")
        with answering(moved) as url, pytest.raises(ShareError, match="307, Temporary Redirect"):
            client.send(url, "{}", SECRET_TOKEN)
    assert asked == []


@pytest.mark.parametrize("change", ["newer", "family", "kernel", "lies"])
def test_a_table_that_is_not_for_this_machine(tmp_path: Path, change: str) -> None:
    good = table(tmp_path)
    texts = {
        "newer": share.render(good).replace('"version": 2', '"version": 3'),
        "family": share.render(good.model_copy(update={"family": "apple-m5"})),
        "kernel": share.render(table(tmp_path, kernel="f" * 16)),
        "lies": share.render(good).replace('"speedup": 3.0', '"speedup": 9.0'),
    }
    faults = {
        "newer": "version: ",
        "family": f"family: it is of apple-m5, this device of {CPU.family}",
        "kernel": "devices.0.kernel: ",
        "lies": "devices.0.buckets.0.",
    }
    with answering(saying(texts[change].encode())) as url:
        (said, _) = refusals(url)
    assert said.startswith(f"{url}: {CPU.family}.json: {faults[change]}")


def test_an_own_winner_stays(tmp_path: Path) -> None:
    db = _database()
    fill(db, (1024,), speedup=2.0)
    with answering(saying(share.render(table(tmp_path)).encode())) as url:
        assert answer("share", "pull", url)["buckets"] == 2
    with Store(db) as store:
        assert [row.speedup for row in store.plans()] == [2.0, 3.0]


# --- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *(
            "file:///etc/passwd",
            "ftp://host",
            "localhost:8001",
            "http://",
            "http://[::1",
            "",
            "http",
        ),
        *(
            "http://host:0",
            "http://host:99999",
            "http://me:secret@host",
            "http://host/?a=b",
            "http://a b",
        ),
        *("http://h\u00f6st", "http://host/\u00e9", "http://host\x00", "http://host\r\nX: y"),
    ],
)
def test_what_is_no_address(url: str) -> None:
    assert (
        error("share", "pull", url) == "the address of a server is http://HOST:PORT or https://HOST"
    )


def test_a_token_is_given_once(tmp_path: Path) -> None:
    fill(_database())
    url = "http://127.0.0.1:9"
    assert "give --token or --token-file" in run("share", "push", url, code=2).stderr
    both = ("--token", "x", "--token-file", str(tmp_path / "t"))
    assert "give --token or --token-file" in run("share", "push", url, *both, code=2).stderr
    missing = error("share", "push", url, "--token-file", str(tmp_path / "t"))
    assert missing == f"cannot read the token in {tmp_path / 't'}: No such file or directory"
    (tmp_path / "t").write_text("two words")
    assert "that is no token" in error("share", "push", url, "--token-file", str(tmp_path / "t"))
    assert "that is no token" in error("share", "push", url, "--token", "x\r\nHost: y")


MINE = replace(CPU, memory_gb=1, name="box of me@home")
UNSOUND = [
    (MINE, "devices.0.name: a path, an address or what can't be printed: 'box of me@home'"),
    (replace(MINE, family="x86_64-zzz", architecture="x86_64-zzz"), "devices.0.name: a path"),
    (replace(MINE, name="no\nline"), "devices.0.name: "),
    (replace(CPU, family="no family", memory_gb=1), "family: String should match pattern"),
    (replace(MINE, backend="cuda", architecture="sm_90"), "does not say by which clock it timed"),
    (replace(CPU, architecture="x" * 999), "devices.0.key: String should have at"),
]


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize(("device", "reason"), UNSOUND, ids=range(len(UNSOUND)))
def test_a_device_that_may_not_be_shared_is_left_out_and_the_others_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device, reason: str, imported: bool
) -> None:
    sent: list[str] = []

    def send(server: str, text: str, *more: object, **how: object) -> dict[str, int]:
        sent.append(text)
        return {"new": 1, "known": 0}

    monkeypatch.setattr(client, "send", send)
    db = fill(_database(), (1024,))
    fill(db, (1024,), device=device)
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE run SET conditions = '{}' WHERE id = 2")
        if imported:
            connection.execute("UPDATE run SET id = -1 WHERE id = 2")
            connection.execute("UPDATE measurement SET run = -1 WHERE run = 2")
            connection.execute("UPDATE plan SET run = -1 WHERE run = 2")
    push = ("share", "push", "http://127.0.0.1:9", "--token", "x", "--db", str(db))
    result = run(*push, code=1)
    assert result.stderr == "Error: 1 device left out: see above\n"
    first, second = result.stdout.splitlines()
    assert first == f"{CPU.family}: 1 new result, 0 known there"
    assert second.startswith(f"left out: {device.key}: ")
    assert reason in second
    named = "does not say" not in reason
    undo = imported and reason.startswith("devices")  # others can't have been imported
    cure = "report it to mla-tuner" if named else "mla-tune --db FILE"
    assert ("mla-tune share import --undo RUN, of " if undo else cure) in second
    (text,) = sent
    assert [each.key for each in share.load(text, "it").devices] == [CPU.key]
    assert list(answer(*push, code=1)["left_out"]) == [device.key]
    for command in ("export", "contribute"):  # a file would lack the device, and nobody know
        told = error("share", command, "--folder", str(tmp_path / "out"), "--db", str(db))
        assert told == second.removeprefix("left out: ").replace(": ", " can't be shared: ", 1)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("system = '/home/x'", "devices.0.system: a path"),
        ("system = ''", "does not say on which system it ran"),
        ("conditions = '[]'", "is malformed"),
        ("software = 'true'", "is malformed"),
    ],
)
def test_a_device_is_sent_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, reason: str
) -> None:
    """Whichever of its runs is at fault: "left out" would be half a lie."""
    monkeypatch.setattr(client, "send", lambda *what, **how: pytest.fail("it was sent"))
    db = fill(fill(_database(), (1024,)), (4096,))
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute(f"UPDATE run SET {change} WHERE id = 2")
    result = run("share", "push", "http://127.0.0.1:9", "--token", "x", "--db", str(db), code=1)
    (said,) = result.stdout.splitlines()
    assert said.startswith(f"left out: {CPU.key}: ")
    assert reason in said
    assert said.endswith(": tune it into another database, mla-tune --db FILE")


def test_where_no_device_may_be_shared_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "send", lambda *what, **how: pytest.fail("it was sent"))
    db = fill(_database(), (1024,), device=MINE)
    result = run("share", "push", "http://127.0.0.1:9", "--token", "x", "--db", str(db), code=1)
    assert result.stdout.startswith(f"left out: {MINE.key}: ")


def test_nothing_to_push_is_said(tmp_path: Path) -> None:
    push = ("share", "push", "http://127.0.0.1:9", "--token", "x", "--db")
    assert "no database at" in error(*push, str(tmp_path / "none.db"))
    Store(tmp_path / "t.db").close()
    assert "holds no winners" in error(*push, str(tmp_path / "t.db"))


# --- serving -------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasette", reason="datasette is not installed")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(tmp_path, signal.SIGINT) as url:
        client.send(url, share.render(table(tmp_path)), token())
    assert [each for each in tmp_path.iterdir() if each.name.startswith("datasette_temp")] == []


def test_serving_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasette", reason="datasette is not installed")
    monkeypatch.delenv("DATASETTE_SECRET", raising=False)
    file = ("--file", str(tmp_path / "shared.db"))
    assert "DATASETTE_SECRET is not set" in error("share", "serve", "--writable", *file)
    monkeypatch.setenv("DATASETTE_SECRET", "short")
    assert "DATASETTE_SECRET is too short" in error("share", "serve", "--writable", *file)
    assert "there is no shared file" in error("share", "serve", *file)
    monkeypatch.setenv("DATASETTE_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = error("share", "serve", "--writable", *file, "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in said
    said = error("share", "serve", "--writable", *file, "--host", "192.0.2.1")
    assert "cannot listen on 192.0.2.1 port 8001" in said


def test_without_the_extra_serving_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mla_tuner.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "datasette", None)
    said = error("share", "serve")
    assert said.endswith(" is not here: pip install 'mla-tuner[server]'")


def test_pulling_and_pushing_need_no_datasette() -> None:
    code = "import mla_tuner.server.cli, mla_tuner.server.client, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"datasette", "uvicorn", "pydantic"} & set(done.stdout.split())


def test_the_answers_of_a_server_are_json(tmp_path: Path) -> None:
    with answering(saying(json.dumps({"new": 1, "known": 2, "ok": True}).encode())) as url:
        assert client.send(url, "{}", "x") == {"new": 1, "known": 2}
