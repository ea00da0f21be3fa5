"""Which tokens of an mlx-lm cache a call attends to, known on the host or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx


class Span(NamedTuple):
    """End of each sequence in its row, the new tokens included, and its start (left padding)."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None = None


class SeenMask(NamedTuple):
    """A mask as a cache made it: for tokens up to `end`, from `starts` on in each row."""

    mask: mx.array
    end: int
    starts: tuple[int, ...] | None


OTHER_MASK = "a mask that the cache did not make"
UNKNOWN = "lengths that are not known on the host"


def seen_mask(cache: Any, q_len: int, mask: Any) -> SeenMask | None:
    """What a cache's `make_mask` just answered, or None where a span can't say it.

    Reading the padding waits for the device only where the batch has changed since.
    """
    if not isinstance(mask, mx.array):
        return None
    padding = getattr(cache, "left_padding", None)
    if padding is None:
        return SeenMask(mask, cache.offset + q_len, None)
    return SeenMask(mask, cache._idx + q_len, tuple(padding.tolist()))


def masks_as_known(kind: Any) -> bool:
    """Whether a cache class's masks mean what `seen_mask` says: two tokens after three are asked.

    The answer is compared, not the source: that of the caches changes with most releases.
    """
    padding = [2, 0]
    try:
        batched = kind.__name__ == "BatchKVCache"
        cache = kind(padding) if batched else kind()
        setattr(cache, "_idx" if batched else "offset", 3)
        mask = cache.make_mask(2, return_array=True, window_size=None)
        rows = [[int(start <= at <= end) for at in range(5)] for start in padding for end in (3, 4)]
        expected = mx.array(rows).reshape(2, 1, 2, 5) if batched else mx.array(rows[2:])
        return bool(mask.shape == expected.shape and mx.all(mask == expected).item())
    except Exception:  # another release's
        return False


def span_of(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """The span of a call before its tokens are written, or why there is none.

    Caches of mlx-lm's own three classes only: a subclass may keep its tokens in another way.
    """
    if cache is None:
        return "no cache"
    rule = _RULES.get(type(cache).__name__)
    if rule is None or type(cache).__module__ != "mlx_lm.models.cache":
        return f"a cache of type {type(cache).__name__}"
    return rule(cache, mask, batch, q_len, seen)


def _default(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    if type(cache.offset) is not int:
        return UNKNOWN
    end = cache.offset + q_len
    if mask is None:
        causal = q_len == 1
    elif isinstance(mask, str):
        causal = mask == "causal"
    else:
        causal = seen is not None and seen.mask is mask and seen[1:] == (end, None)
    return Span((end,) * batch) if causal else OTHER_MASK


def _batched(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """The mask rules, as it does in mlx-lm: the first layer's padding counts for all layers."""
    if mask is None or seen is None or seen.mask is not mask:
        return OTHER_MASK
    end, starts = seen.end, seen.starts
    if starts is None or len(starts) != batch or cache._idx + q_len != end:
        return OTHER_MASK
    if max(starts) > end - q_len:
        return "a token of padding among the new ones"
    return Span((end,) * batch, starts if any(starts) else None)


def _rotating(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """One query without a mask sees all that is there, in any order: keys carry their rope."""
    if q_len > 1:
        return "several tokens on a rotating cache"
    if mask is not None:
        return OTHER_MASK
    if type(cache.offset) is not int:
        return UNKNOWN
    return Span((min(cache.offset + 1, cache.max_size),) * batch)


_Rule = Callable[[Any, Any, int, int, SeenMask | None], Span | str]
_RULES: dict[str, _Rule] = {
    "KVCache": _default,
    "BatchKVCache": _batched,
    "RotatingKVCache": _rotating,
}
