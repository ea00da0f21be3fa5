"""mlx-lm's server over HTTP on the loopback, many clients at once, with and without the plan."""

from __future__ import annotations

import json
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

from mlx.utils import tree_flatten
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from serving_steps import BOUND, StubPolicy
from tiny_models import VOCABULARY, tiny_config, tiny_model

from mla_tuner.integrations.mlx_lm import patch, stats

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

CLIENTS, REQUESTS, ANSWER = 8, 200, 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: weights, config.json and a tokenizer of words w0, w1, .."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("deepseek_v3")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {**tiny_config("deepseek_v3"), "eos_token_id": VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{VOCABULARY - 1}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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

    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    thread = Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        generator.stop_and_join()


def prompt(number: int) -> str:
    return " ".join(
        f"w{(number * 7 + at * at) % (VOCABULARY - 1)}" for at in range(60 + number % 50)
    )


def tied(number: int, ours: str, theirs: str) -> bool:
    """Whether two answers part where the model itself is undecided: batches round differently."""
    pairs = enumerate(zip(ours.split(), theirs.split(), strict=False))
    at, parting = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (0, ()))
    words = prompt(number).split() + theirs.split()[:at]
    logits = tiny_model("deepseek_v3")(mx.array([[int(word[1:]) for word in words]]))[0, -1]
    one, other = (float(logits[int(word[1:])]) for word in parting)
    return abs(one - other) < BOUND


def answers(address: str) -> list[str]:
    """Every request's text, asked by all clients at once."""

    def ask(number: int) -> str:
        asked = {"model": "default_model", "prompt": prompt(number), "max_tokens": ANSWER}
        data = json.dumps({**asked, "temperature": 0}).encode()
        request = Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["text"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, range(REQUESTS)))


def test_no_request_is_lost_and_every_answer_is_that_of_stock(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(saved, monkeypatch) as address:
        theirs = answers(address)
    with patch(StubPolicy()), serving(saved, monkeypatch) as address:
        ours = answers(address)
    assert len(theirs) == REQUESTS
    assert len(set(theirs)) > REQUESTS / 10
    pairs = enumerate(zip(ours, theirs, strict=True))
    assert [pair for number, pair in pairs if pair[0] != pair[1] and not tied(number, *pair)] == []
    counts = stats()
    decoded = counts.routed + counts.stock - counts.reasons["prefill"]
    assert counts.routed > REQUESTS
    assert counts.routed > 0.95 * decoded
    assert counts.look_ups <= counts.routed / 2  # layers; steps of the same shape may share one
