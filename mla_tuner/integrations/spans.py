"""Which tokens of an mlx-lm cache a call attends to, known on the host or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast

import mlx.core as mx


class Span(NamedTuple):
    """End of each sequence in its row, the new tokens included, and its start (left padding).

    window: what a query sees at most, its own token included, where that is less than all.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    window: int | None = None

    def queries(self, q_len: int) -> list[Span]:
        """A span for each query token: under a window each has a start of its own."""
        assert self.window is not None
        starts = self.starts or (0,) * len(self.lengths)
        spans = []
        for left in reversed(range(q_len)):
            ends = tuple(end - left for end in self.lengths)
            firsts = zip(starts, ends, strict=True)
            spans.append(Span(ends, tuple(max(at, end - self.window) for at, end in firsts)))
        return spans


@dataclass(eq=False)
class SeenMask:
    """A mask as a cache made it: for tokens up to `end`, and the last `window` of them alone.

    padding: each row's, of which `dropped` tokens have left the cache since; None: there is none.
    rotated: the row begins in its middle.
    """

    mask: mx.array
    end: int
    window: int | None = None
    padding: mx.array | None = None
    dropped: int = 0
    rotated: bool = False

    @cached_property
    def starts(self) -> tuple[int, ...] | None:
        """First token of each row. Waits for the device where the padding has changed since."""
        if self.padding is None:
            return None
        padding = cast("list[int]", self.padding.tolist())
        return tuple(max(0, each - self.dropped) for each in padding)


OTHER_MASK = "a mask that the cache did not make"
UNKNOWN = "lengths that are not known on the host"
PADDED = "a token of padding among the new ones"
ROTATED = "padding in the middle of a rotated cache"


def seen_mask(cache: Any, q_len: int, mask: Any) -> SeenMask | None:
    """What a cache's `make_mask` just answered, or None where a span can't say it."""
    if not isinstance(mask, mx.array):
        return None
    window = getattr(cache, "max_size", None)
    padding = getattr(cache, "left_padding", None)
    if window is None:
        held = cache.offset if padding is None else cache._idx
        return SeenMask(mask, held + q_len, padding=padding)
    if padding is None:
        return SeenMask(mask, _held(cache.offset, window) + q_len, window)
    rotated = q_len == 1 and (cache.rotated or cache._idx >= window)
    dropped = max(0, cache._idx - window + (q_len > 1)) + rotated
    return SeenMask(mask, _held(cache._offset, window) + q_len, window, padding, dropped, rotated)


def _held(offset: int, max_size: int) -> int:
    """Tokens that a rotating cache keeps of those before a call."""
    return min(offset, max_size - 1)


def span_of(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """The span of a call before its tokens are written, or why there is none.

    Caches of mlx-lm's own four classes only: a subclass may keep its tokens in another way.
    """
    if cache is None:
        return "no cache"
    rule = _RULES.get(type(cache).__name__)
    if rule is None or type(cache).__module__ != "mlx_lm.models.cache":
        return f"a cache of type {type(cache).__name__}"
    return rule(cache, mask, batch, q_len, seen if seen and seen.mask is mask else None)


def _default(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    if type(cache.offset) is not int:
        return UNKNOWN
    end = cache.offset + q_len
    if mask is None:
        causal = q_len == 1
    elif isinstance(mask, str):
        causal = mask == "causal"
    else:
        causal = seen is not None and (seen.end, seen.padding, seen.window) == (end, None, None)
    return Span((end,) * batch) if causal else OTHER_MASK


def _batched(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """The mask rules, as it does in mlx-lm: the first layer's padding counts for all layers."""
    if seen is None or seen.window is not None or cache._idx + q_len != seen.end:
        return OTHER_MASK
    return _padded(seen, batch, q_len)


def _rotating(cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None) -> Span | str:
    """One query without a mask sees all that is there, in any order: keys carry their rope.

    Several come with the tokens before them in order, and each sees the last `max_size` up to its
    own.
    """
    if type(cache.offset) is not int:
        return UNKNOWN
    window = cache.max_size
    end = _held(cache.offset, window) + q_len
    if mask is None and q_len == 1:
        return Span((end,) * batch)
    if isinstance(mask, str) and mask == "causal":
        return Span((end,) * batch)
    if seen is None or (seen.end, seen.padding, seen.window) != (end, None, window):
        return OTHER_MASK
    return Span((end,) * batch, window=window if end > window else None)


def _batched_rotating(
    cache: Any, mask: Any, batch: int, q_len: int, seen: SeenMask | None
) -> Span | str:
    end = _held(cache._offset, cache.max_size) + q_len
    if seen is None or (seen.end, seen.window) != (end, cache.max_size):
        return OTHER_MASK
    if seen.rotated and any(seen.starts or ()):
        return ROTATED
    return _padded(seen, batch, q_len)


def _padded(seen: SeenMask, batch: int, q_len: int) -> Span | str:
    end, starts, window = seen.end, seen.starts, seen.window
    if starts is None or len(starts) != batch:
        return OTHER_MASK
    if max(starts) > end - q_len:
        return PADDED
    cut = window if window is not None and q_len > 1 and end > window else None
    return Span((end,) * batch, starts if any(starts) else None, cut)


_Rule = Callable[[Any, Any, int, int, SeenMask | None], Span | str]
_RULES: dict[str, _Rule] = {
    "KVCache": _default,
    "BatchKVCache": _batched,
    "RotatingKVCache": _rotating,
    "BatchRotatingKVCache": _batched_rotating,
}
CACHES = tuple(_RULES)


# --- whether a release's masks mean that ---------------------------------------------------------

_PADDING = [2, 0]
_WINDOW = 6
# Tokens of each call before the mask is asked for: none, some, more than the window, one at a time.
_HISTORIES = ((), (4,), (6,), (4, 4), (4, 1, 1, 1, 1))


def masks_as_known(kind: Any) -> bool:
    """Whether a cache class's masks are those that `seen_mask` reads in them, in a few states.

    The answer is compared, not the source: that of the caches changes with most releases.
    """
    try:
        asked = product(_HISTORIES, (1, 2))
        return all(_mask_as_known(_filled(kind, history), q_len) for history, q_len in asked)
    except Exception:  # another release's
        return False


def _filled(kind: Any, history: tuple[int, ...]) -> Any:
    rotating = [_WINDOW] if "Rotating" in kind.__name__ else []
    batched = [_PADDING] if "Batch" in kind.__name__ else []
    cache = kind(*rotating, *batched)
    for count in history:
        cache.update_and_fetch(*[mx.zeros((len(_PADDING), 1, count, 1))] * 2)
    return cache


def _mask_as_known(cache: Any, q_len: int) -> bool:
    mask = cache.make_mask(q_len, return_array=True, window_size=None)
    if mask is None:
        return True
    span = span_of(cache, mask, len(_PADDING), q_len, seen_mask(cache, q_len, mask))
    if isinstance(span, str):
        return span in (PADDED, ROTATED)
    end = span.lengths[0]
    queries = span._replace(window=span.window or end).queries(q_len)
    starts = mx.array([each.starts for each in queries])[..., None]  # [q_len, batch, 1]
    ends = mx.array([each.lengths for each in queries])[..., None]
    allowed = (starts <= mx.arange(end)) & (mx.arange(end) < ends)
    allowed = allowed.swapaxes(0, 1)[:, None]  # [batch, 1, q_len, end]
    return mask.shape[-2:] == allowed.shape[-2:] and bool(mx.all(mask == allowed).item())
