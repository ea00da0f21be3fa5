"""The attention of recognised classes against float64, beside what MLX's operations make of it."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from latent_calls import rms, wide
from mlx_lm.models.cache import CacheList, KVCache
from serving_steps import KINDS, StubPolicy, attentions
from tiny_models import tiny_model

from mla_tuner import last_run, mla_decode
from mla_tuner.caches import DenseCache
from mla_tuner.cases import TOLERANCE
from mla_tuner.integrations import absorb, routing
from mla_tuner.integrations.mla_classes import MlaClass, plain
from mla_tuner.integrations.mlx_lm import patch, stats
from mla_tuner.plan import Plan

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

PROMPT = 300
SINGLE = Plan("single")
NAMES = [name for name, kind in KINDS.items() if not kind.indexed and not kind.query_scale]


def shown(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def errors(out: mx.array, q: Any, q_pe: Any, latent: Any, k_pe: Any, scale: float) -> np.ndarray:
    """Each row's error against float64, relative to its length; queries are causal."""
    q, q_pe, latent, k_pe = (wide(each) for each in (q, q_pe, latent, k_pe))
    scores = (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * scale
    q_len, tokens = scores.shape[-2:]
    scores[..., np.arange(tokens) > np.arange(tokens - q_len, tokens)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = weights / weights.sum(-1, keepdims=True) @ latent
    return np.linalg.norm(wide(out) - truth, axis=-1) / np.linalg.norm(truth, axis=-1)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=shown)
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_no_worse_than_that_of_mlx(
    name: str, dtype: mx.Dtype, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = attentions(tiny_model(name), KINDS[name])[0]
    attention.eval()
    attention.set_dtype(dtype)
    x = mx.random.normal((1, PROMPT + q_len, 32), dtype, key=mx.random.key(5))
    calls: list[tuple[Any, ...]] = []
    decode = routing.decode

    def seen(step: Any, *given: Any) -> mx.array:
        calls.append((decode(step, *given), *given))
        return calls[-1][0]

    monkeypatch.setattr(routing, "decode", seen)
    cache = KVCache()
    with patch(StubPolicy()):
        for part in mx.split(x, [PROMPT], axis=1):
            mask = cache.make_mask(part.shape[1], return_array=True, window_size=None)
            attention(part, mask, cache)
    assert stats().plans == {"split x2": 1}
    ((out, *given),) = calls
    mine, theirs = (errors(each, *given).max() for each in (out, plain(*given, mask)))
    assert mine < TOLERANCE[shown(dtype)]
    assert mine <= theirs


@pytest.mark.parametrize("larger", [1, 4, 16])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=shown)
def test_errors_are_smaller_than_those_of_mlx(
    dtype: mx.Dtype, heads: int, q_len: int, larger: float, isa: str
) -> None:
    """With scores up to 5, 20 and 80, by root mean square: of two roundings of one answer either
    may be the luckier.
    """
    mine: list[np.ndarray] = []
    theirs: list[np.ndarray] = []
    for tokens, seed in product((6, 300), range(6)):
        keys = mx.random.split(mx.random.key(seed), 4)
        shapes = (heads, q_len, 512), (heads, q_len, 64), (1, tokens, 512), (1, tokens, 64)
        drawn = zip(shapes, keys, (larger, larger, 1, 1), strict=True)
        q, q_pe, latent, k_pe = (
            (by * mx.random.normal((1, *shape), key=key)).astype(dtype) for shape, key, by in drawn
        )
        given = q, q_pe, latent, k_pe, 192**-0.5
        cache, plan = DenseCache(latent, k_pe, [tokens]), Plan("split", 2) if seed % 2 else SINGLE
        out = mla_decode(q, q_pe, cache, scale=given[-1], plan=plan)
        mine.append(errors(out, *given))
        theirs.append(errors(plain(*given, "causal"), *given))
        assert last_run().plan == plan
    assert rms(mine) < rms(theirs)


def answer(kind: MlaClass, module: Any, x: mx.array, q_len: int) -> np.ndarray:
    """A module's answer to the last `q_len` of the tokens."""
    cache = CacheList(KVCache(), KVCache()) if kind.indexed else KVCache()
    for part in mx.split(x, [x.shape[1] - q_len], axis=1):
        seen = cache[0] if kind.indexed else cache
        mask = seen.make_mask(part.shape[1], return_array=True, window_size=None)
        scale = [mx.full((1, 1, part.shape[1], 1), 1.25, x.dtype)] * kind.query_scale
        out = module(part, *scale, mask, cache)
    return np.array(out).astype(np.float64)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kind", [*KINDS.values(), *absorb.CLASSES], ids=lambda kind: kind.module)
def test_a_module_answers_no_worse_than_stock_in_float32(kind: MlaClass, q_len: int) -> None:
    """From hidden states to hidden states, by root mean square over some sequences."""
    module = attentions(tiny_model(kind.module), kind)[0]
    x = mx.random.normal((32 // q_len, 100 + q_len, 32), key=mx.random.key(3))
    theirs = answer(kind, module, x, q_len)
    with mx.stream(mx.cpu):
        module.set_dtype(mx.float64)
        truth = answer(kind, module, x.astype(mx.float64), q_len)
    module.set_dtype(mx.float32)
    with patch(StubPolicy(), absorb=True):
        mine = answer(kind, module, x, q_len)
    assert stats().plans == {"split x2": 1}
    length = np.linalg.norm(truth, axis=-1)
    off = [np.linalg.norm(each - truth, axis=-1) / length for each in (mine, theirs)]
    assert rms([off[0]]) < rms([off[1]]) < TOLERANCE["float32"]
