"""The attention of recognised classes against float64, beside what MLX's operations make of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from latent_calls import wide
from mlx_lm.models.cache import KVCache
from serving_steps import KINDS, StubPolicy, attentions
from tiny_models import tiny_model

from mla_tuner.cases import TOLERANCE
from mla_tuner.integrations import routing
from mla_tuner.integrations.mla_classes import plain
from mla_tuner.integrations.mlx_lm import patch, stats

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

PROMPT = 300
NAMES = [name for name, kind in KINDS.items() if not kind.indexed and not kind.query_scale]


def shown(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def error(out: mx.array, q: Any, q_pe: Any, latent: Any, k_pe: Any, scale: float) -> float:
    """The largest error of a row against float64, relative to its length; queries are causal."""
    q, q_pe, latent, k_pe = (wide(each) for each in (q, q_pe, latent, k_pe))
    scores = (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * scale
    q_len, tokens = scores.shape[-2:]
    scores[..., np.arange(tokens) > np.arange(tokens - q_len, tokens)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = weights / weights.sum(-1, keepdims=True) @ latent
    off = np.linalg.norm(wide(out) - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
    return float(off.max())


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
    mine, theirs = error(out, *given), error(plain(*given, mask), *given)
    assert mine < TOLERANCE[shown(dtype)]
    assert mine <= theirs
