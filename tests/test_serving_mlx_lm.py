"""mlx-lm's server over HTTP on the loopback, many clients at once, with and without the plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from commands import run
from mlx.utils import tree_flatten
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from serving_steps import StubPolicy, breaking
from tiny_models import VOCABULARY, tiny_config, tiny_model

from mla_tuner.integrations import routing
from mla_tuner.integrations.mlx_lm import patch, stats

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

ANSWER = 12  # tokens
SHORT, FULL = (4, 16), (8, 200)  # clients and requests


def saved(name: str, folder: Path) -> Path:
    """A model's folder: weights, config.json and a tokenizer of words w0, w1, .."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = tiny_model(name)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {**tiny_config(name), "eos_token_id": VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{VOCABULARY - 1}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of all clients at once, however late this thread is


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that `mlx_lm.server --model folder` would be."""
    providers: list[Any] = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", "--model", str(folder)])
    server.main()
    generator = server.ResponseGenerator(providers[0], LRUPromptCache())

    def handler(*arguments: Any) -> Any:
        return server.APIHandler(generator, *arguments, system_fingerprint="test")

    http = Server(("127.0.0.1", 0), handler)
    thread = Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
        assert generator.is_healthy
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        generator.stop_and_join()
        gone(generator._generation_thread)


def gone(thread: Thread) -> None:
    """Waits for what is left of a thread after `join`: MLX frees there what it kept for it.

    It asks for the lock of Python, which aborts where it ends meanwhile: exit code 134 after
    all tests passed. So ended 6 of 12 runs of a script with six servers (MLX 0.32.4, Python 3.11).
    """
    task = Path(f"/proc/self/task/{thread.native_id}")  # nothing elsewhere than on Linux
    while task.exists():
        os.sched_yield()


def prompt(number: int) -> str:
    return " ".join(
        f"w{(number * 7 + at * at) % (VOCABULARY - 1)}" for at in range(60 + number % 50)
    )


def answers(address: str, clients: int, requests: int) -> list[str]:
    """Every request's text, asked by all clients at once."""

    def ask(number: int) -> str:
        asked = {"model": "default_model", "prompt": prompt(number), "max_tokens": ANSWER}
        data = json.dumps({**asked, "temperature": 0}).encode()
        request = Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["text"])

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, range(requests)))


# Each answer is exactly that of stock, whatever batch it was part of: other orders of sums move
# these logits by 1e-6, and the two best tokens of every step are 2e-5 or more apart.
@pytest.mark.parametrize("load", [SHORT, pytest.param(FULL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_no_request_is_lost_and_every_answer_is_that_of_stock(
    name: str, load: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (_, requests) = saved(name, tmp_path), load
    with serving(folder, monkeypatch) as address:
        theirs = answers(address, *load)
    with patch(StubPolicy(), absorb=True), serving(folder, monkeypatch) as address:
        ours = answers(address, *load)
    assert len(theirs) == requests
    assert len(set(theirs)) > requests / 10
    assert ours == theirs
    counts = stats()
    decoded = counts.routed + counts.stock - counts.reasons["prefill"]
    assert counts.routed >= requests / 8 * ANSWER  # eight in a batch at most, two layers
    assert counts.routed > 0.95 * decoded
    assert counts.look_ups <= counts.routed / 2  # layers; steps of the same shape may share one


def test_no_request_is_lost_where_the_kernel_begins_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("deepseek_v3", tmp_path)
    with serving(folder, monkeypatch) as address:
        theirs = answers(address, *SHORT)
    monkeypatch.setattr(routing, "mla_decode", breaking(after=7))
    with patch(StubPolicy()), serving(folder, monkeypatch) as address:
        ours = answers(address, *SHORT)
    assert ours == theirs
    assert stats().routed == 7
    assert stats().reasons["the plan split x2 failed"] == 1
    assert [line for line in caplog.messages if "not used again" in line] == [
        "plan split x2 is not used again: no such kernel"
    ]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_a_command_of_mlx_lm_says_what_it_says_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", str(saved(name, tmp_path)), "--prompt", prompt(1), "--max-tokens", "6"]
    command = ["mlx_lm.generate", *options, "--temp", "0", "--ignore-chat-template"]

    def said() -> str:
        return run("run", "--absorb", "--", *command).stdout.split("==========")[1]

    monkeypatch.setenv("MLA_TUNER", "off")
    theirs = said()
    assert len(theirs.split()) == 6
    monkeypatch.setenv("MLA_TUNER", "force")
    assert said() == theirs
    assert stats().routed >= 2 * 6
    assert all(plan.startswith(("single", "split")) for plan in stats().plans)
