"""mlx-lm decodes through the tuned plan: `install()`, before or after a model is loaded."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..shapes import MAX_Q_LEN
from .counts import Stats
from .mla_classes import CLASSES, MlaClass, fingerprint
from .routing import Router
from .spans import masks_as_known, seen_mask

if TYPE_CHECKING:
    from ..policy import Policy

log = logging.getLogger("mla_tuner")
ROUTED = "routed"
_CACHES = ("KVCache", "BatchKVCache")


class _Binding(NamedTuple):
    """A class's method that is ours now, and the one that it replaced."""

    owner: type
    name: str
    ours: Any
    stock: Any

    @property
    def bound(self) -> bool:
        return vars(self.owner).get(self.name) is self.ours


_lock = threading.Lock()
_router: Router | None = None  # None: our methods pass every call on
_last = Stats()
_bindings: dict[tuple[type, str], _Binding] = {}


def install(policy: Policy | None = None) -> Stats:
    """Route the decode calls of mlx-lm's MLA models, loaded or not, in this process.

    policy: decides the plans; without it the policy of this process does. A second call only
    changes the policy.

    Returns the counts, whose `classes` say what is routed. A class of unknown source stays as it
    is, and so does all where mlx-lm is missing: that is one log line, never an error.
    """
    global _router
    with _lock:
        if _router is not None:
            if policy is not None:
                _router = _renewed(_router, policy)
            return _router.stats.copy()
        router = Router(policy)
        router.stats.classes = {kind.name: _bind_class(kind) for kind in CLASSES}
        if ROUTED in router.stats.classes.values():
            _bind_caches()
        _router = router
        for name, why in router.stats.classes.items():
            if why != ROUTED:
                log.info("mlx-lm's %s is not routed: %s", name, why)
        return router.stats.copy()


def uninstall() -> None:
    """Give mlx-lm its methods back. What others have wrapped since stays, and passes calls on."""
    global _router, _last
    with _lock:
        if _router is None:
            return
        _last, _router = _router.stats, None
        for key, binding in list(_bindings.items()):
            if binding.bound:
                setattr(binding.owner, binding.name, binding.stock)
                del _bindings[key]


def stats() -> Stats:
    """The counts since `install`; after `uninstall` the last ones. A copy."""
    router = _router
    return (_last if router is None else router.stats).copy()


class patch:  # noqa: N801 - reads as a function: `with patch(): ...`
    """`install` for a `with` block. A handle that is dropped changes nothing; only its end does."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy
        self._outer = False

    def __enter__(self) -> patch:
        self._outer = _router is not None
        install(self._policy)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._outer:
            uninstall()


def _renewed(old: Router, policy: Policy) -> Router:
    router = Router(policy)
    router.stats = old.stats
    return router


def _bind_class(kind: MlaClass) -> str:
    """Bind our `__call__` to an attention class; returns `ROUTED` or why not."""
    try:
        owner = getattr(importlib.import_module(f"mlx_lm.models.{kind.module}"), kind.name)
    except Exception as error:  # a broken install of mlx-lm fails in many ways
        return f"{type(error).__name__}: {error}"
    if (owner, "__call__") in _bindings:  # left behind, because others have wrapped it
        return ROUTED
    stock = vars(owner).get("__call__")
    if fingerprint(stock) != kind.fingerprint:
        return "its source is not the known one"
    _bind(owner, "__call__", _scaled_call(kind, stock) if kind.query_scale else _call(kind, stock))
    return ROUTED


def _bind_caches() -> None:
    """The masks that caches make are noted: a mask says nothing of its own origin."""
    caches = importlib.import_module("mlx_lm.models.cache")
    for name in _CACHES:
        owner = getattr(caches, name, None)
        if owner is None or (owner, "make_mask") in _bindings:
            continue
        if "make_mask" in vars(owner) and masks_as_known(owner):
            _bind(owner, "make_mask", _noting(owner.make_mask))
        else:
            log.info("mlx-lm's %s makes masks of its own: they are not interpreted", name)


def _bind(owner: type, name: str, ours: Any) -> None:
    _bindings[owner, name] = _Binding(owner, name, ours, vars(owner)[name])
    setattr(owner, name, ours)


def _call(kind: MlaClass, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        router = _router
        step = router.step(kind, self, x, mask, cache) if router else None
        if router is None or step is None:
            return stock(self, x, mask, cache)
        return router.run(step, kind, self, x, None, mask, cache)

    return call


def _scaled_call(kind: MlaClass, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, x: Any, attn_scale: Any, mask: Any = None, cache: Any = None) -> Any:
        router = _router
        step = router.step(kind, self, x, mask, cache) if router else None
        if router is None or step is None:
            return stock(self, x, attn_scale, mask, cache)
        return router.run(step, kind, self, x, attn_scale, mask, cache)

    return call


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def make_mask(self: Any, N: int, *args: Any, **options: Any) -> Any:  # noqa: N803 - mlx-lm's
        mask = stock(self, N, *args, **options)
        router = _router
        if router and N <= MAX_Q_LEN and not args and options.get("window_size") is None:
            try:
                router.seen = seen_mask(self, N, mask)
            except Exception as error:  # another release's cache: its masks stay unknown
                log.debug("a mask was not noted: %s", error)
                router.seen = None
        return mask

    return make_mask
