"""Calls of mlx-lm's attention function on a latent, with their truth in float64. Needs mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

SCALE = 192**-0.5


class OwnCache(KVCache):  # type: ignore[misc]
    """A cache that an engine keeps in a way of its own."""


class Call:
    """Random inputs of the function as mlx-lm hands them over: the latent is cut from a buffer."""

    def __init__(
        self,
        heads: int = 16,
        dtype: mx.Dtype = mx.float32,
        *,
        batch: int = 1,
        q_len: int = 1,
        tokens: int = 200,
        rank: int = 512,
        masked: float | None = None,
        larger: float = 1,
    ) -> None:
        keys = iter(mx.random.split(mx.random.key(heads + batch), 5))
        self.queries = mx.random.normal((batch, heads, q_len, rank), dtype, key=next(keys))
        buffer = mx.random.normal((batch, 1, 256, rank), dtype, key=next(keys))
        self.latent = buffer[..., :tokens, :]
        self.cache = KVCache()
        self.cache.keys = buffer
        rows = heads, q_len, tokens
        scores = larger * mx.random.normal((batch, *rows), key=next(keys))
        low = mx.finfo(dtype).min if masked is None else masked
        seen = mx.random.uniform(shape=(batch, 1, q_len, tokens), key=next(keys)) < 0.7
        self.mask = mx.where(seen, scores, low).astype(dtype)

    def run(self, **changed: Any) -> mx.array:
        arguments = {"cache": self.cache, "scale": SCALE, "mask": self.mask, **changed}
        return base.scaled_dot_product_attention(
            self.queries, self.latent, self.latent, **arguments
        )

    def error(self, out: mx.array) -> float:
        return float(self.errors(out).max())

    def errors(self, out: mx.array) -> np.ndarray:
        """Each row's error against float64, relative to its length."""
        batch, heads, q_len, _ = self.queries.shape
        rows = batch, heads * q_len, -1  # one product for all of them
        queries, mask = (wide(each).reshape(rows) for each in (self.queries, self.mask))
        latent = wide(self.latent)[:, 0]
        scores = queries @ latent.swapaxes(-1, -2) * SCALE + np.maximum(mask, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        truth = (weights / weights.sum(-1, keepdims=True) @ latent).reshape(self.queries.shape)
        return np.linalg.norm(wide(out) - truth, axis=-1) / np.linalg.norm(truth, axis=-1)


def rms(found: list[np.ndarray]) -> float:
    """Root mean square of all of them."""
    return float(np.sqrt(np.mean(np.concatenate([each.ravel() for each in found]) ** 2)))


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)
