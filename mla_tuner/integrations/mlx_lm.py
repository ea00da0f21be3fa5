"""mlx-lm decodes through the tuned plan: `install()`, before or after a model is loaded."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..modes import known_mode
from ..shapes import MAX_Q_LEN
from . import absorb as absorption
from . import shared_attention as shared
from .absorb import absorb
from .bindings import Bindings
from .counts import Stats
from .mla_classes import CLASSES, UNKNOWN_SOURCE, MlaClass, class_of, fingerprint
from .routing import FAILED
from .shared_attention import ROUTED, FunctionRouter, decided
from .spans import CACHES, masks_as_known, seen_mask

if TYPE_CHECKING:
    from ..policy import Policy

__all__ = ["absorb", "install", "patch", "stats", "uninstall"]
log = logging.getLogger("mla_tuner")
_lock = threading.Lock()
_router: FunctionRouter | None = None  # None: ours pass every call on
_last = Stats()
_absorbs = False  # whether models are to be absorbed at their first token
_stays = False  # whether `install` was called, and not only `patch`
_blocks: list[patch] = []  # that have not ended
_bindings = Bindings()


def install(policy: Policy | None = None, *, absorb: bool = False) -> Stats:
    """Route the decode calls of mlx-lm's MLA models, loaded or not, in this process.

    Attention classes that are recognised are routed as a whole; those that are not, and mlx-vlm's
    where it is loaded, by the attention function that they share.

    policy: decides the plans; without it the policy of this process does. absorb: models that
    cache keys and values of every head are changed to cache latents instead, each at its first
    token from now on; see `absorb`. A second call only changes the policy, absorbs if asked to, and
    binds to mlx-vlm if that was loaded meanwhile.

    Returns the counts, whose `classes` say what is routed. A class of unknown source stays as it
    is, and so does all where mlx-lm is missing: that is one log line, never an error. With
    MLA_TUNER=off nothing is installed; `log` prints the counts when the process ends, and `force`
    runs our kernels wherever they can.
    """
    global _stays
    with _lock:
        _stays = True
        return _install(policy, absorb)


def uninstall() -> None:
    """Give mlx-lm its code back. What others have wrapped since stays, and passes calls on."""
    with _lock:
        _uninstall()


def stats() -> Stats:
    """The counts since `install`; after `uninstall` the last ones. A copy."""
    router = _router
    return (_last if router is None else router.stats).copy()


class patch:  # noqa: N801 - reads as a function: `with patch(): ...`
    """`install` for a `with` block. A handle that is dropped changes nothing; only its end does.

    Blocks may overlap, in threads too: the last to end uninstalls, unless `install` was called. A
    policy, and `absorb`, that an inner one gives stay until then.
    """

    def __init__(self, policy: Policy | None = None, *, absorb: bool = False) -> None:
        self._policy = policy
        self._absorb = absorb

    def __enter__(self) -> patch:
        with _lock:
            _install(self._policy, self._absorb)
            _blocks.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            if self in _blocks:  # not where `uninstall` was called meanwhile
                _blocks.remove(self)
                if not _blocks and not _stays:
                    _uninstall()


def _install(policy: Policy | None, absorb: bool) -> Stats:
    global _router, _last, _absorbs
    wanted = known_mode()
    if wanted == "off" and _router is None:
        log.info("MLA_TUNER=off: nothing is installed in mlx-lm")
        names = [*map(_name, CLASSES), f"base.{shared.NAME}"]
        _last = Stats(classes=dict.fromkeys(names, "MLA_TUNER=off"))
        return _last.copy()
    _absorbs = _absorbs or absorb
    if _router is None:
        _router = _installed(policy, wanted)
    else:
        if policy is not None:
            _router = _renewed(_router, policy)
        _router.stats.classes |= _bind_functions()
    if absorb:
        _bind_absorbing()
    return _router.stats.copy()


def _uninstall() -> None:
    global _router, _last, _absorbs, _stays
    _stays = False
    _blocks.clear()
    if _router is not None:
        _last, _router, _absorbs = _router.stats, None, False
    _bindings.release()  # again, too: whoever had wrapped ours may have given it back since
    shared.release()


def _installed(policy: Policy | None, wanted: str) -> FunctionRouter:
    """A router with everything bound that calls it."""
    router = FunctionRouter(policy, wanted == "force", FAILED)
    if router.force:
        log.warning("MLA_TUNER=force: our kernels run wherever they can, faster or not")
    if wanted == "log":
        atexit.unregister(_print_counts)  # once, however often this is installed
        atexit.register(_print_counts)
    router.stats.classes = {_name(kind): _bind_class(kind) for kind in CLASSES}
    router.stats.classes |= {_name(kind): _bind_absorbed(kind) for kind in absorption.CLASSES}
    if any(why.startswith(ROUTED) for why in router.stats.classes.values()):
        _bind_caches()
    router.stats.classes |= _bind_functions()
    for why, names in _others(router.stats).items():
        if not why.startswith(ROUTED):
            log.info("mlx-lm's %s: not routed: %s", names, why)
    return router


def _others(counts: Stats) -> dict[str, str]:
    """The classes that are not routed, or not yet, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in counts.classes.items():
        if why != ROUTED:
            reasons.setdefault(why, []).append(name)
    return {why: ", ".join(names) for why, names in reasons.items()}


def _print_counts() -> None:
    counts = stats()
    print(counts, file=sys.stderr)
    if not counts.routed + counts.stock:  # what could be meant by that
        for why, names in _others(counts).items():
            print(f"  {names}: {why}", file=sys.stderr)


def _name(kind: MlaClass) -> str:
    return f"{kind.module}.{kind.name}"


def _renewed(old: FunctionRouter, policy: Policy) -> FunctionRouter:
    router = FunctionRouter(policy, old.force, FAILED)
    router.stats = old.stats
    return router


def _bind_class(kind: MlaClass) -> str:
    """Bind our `__call__` to an attention class; returns `ROUTED` or why not."""
    owner = class_of(kind)
    if isinstance(owner, str):
        return owner
    if (owner, "__call__") in _bindings:  # left behind, because others have wrapped it
        return ROUTED
    stock: Any = vars(owner).get("__call__")
    if fingerprint(stock) != kind.fingerprint:
        return UNKNOWN_SOURCE
    ours = _scaled_call(kind, stock) if kind.query_scale else _call(kind, stock)
    _bindings.bind(owner, "__call__", ours)
    return ROUTED


def _bind_absorbed(kind: MlaClass) -> str:
    """The same for what modules of a class become once they are absorbed."""
    owner = _absorbable(kind)
    if isinstance(owner, str):
        return owner
    absorbed = absorption.absorbed_class(owner, kind)
    if (absorbed, "__call__") not in _bindings:
        _bindings.bind(absorbed, "__call__", _call(kind, vars(absorbed)["__call__"]))
    return f"{ROUTED} once it is absorbed"


def _absorbable(kind: MlaClass) -> type | str:
    owner = class_of(kind)
    if isinstance(owner, type) and (owner, "__call__") in _bindings:
        return owner  # left behind, because others have wrapped it
    return absorption.owner_of(kind)


def _bind_functions() -> dict[str, str]:
    return shared.bind(_bindings, lambda: _router)


def _bind_absorbing() -> None:
    for kind in absorption.CLASSES:
        owner = _absorbable(kind)
        if isinstance(owner, type) and (owner, "__call__") not in _bindings:
            stock = vars(owner)["__call__"]
            _bindings.bind(owner, "__call__", absorption.absorbing(kind, stock, lambda: _absorbs))


def _bind_caches() -> None:
    """The masks that caches make are noted: a mask says nothing of its own origin."""
    caches = importlib.import_module("mlx_lm.models.cache")
    for name in CACHES:
        owner = getattr(caches, name, None)
        if owner is None or (owner, "make_mask") in _bindings:
            continue
        if "make_mask" in vars(owner) and masks_as_known(owner):
            _bindings.bind(owner, "make_mask", _noting(owner.make_mask))
        else:
            log.info("mlx-lm's %s makes masks of its own: they are not interpreted", name)


def _call(kind: MlaClass, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        router = _router
        step = router.step(kind, self, x, mask, cache) if router else None
        if router is None or step is None:
            return decided(stock, self, x, mask, cache)
        return router.run(step, kind, self, x, None, mask, cache)

    return call


def _scaled_call(kind: MlaClass, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, x: Any, attn_scale: Any, mask: Any = None, cache: Any = None) -> Any:
        router = _router
        step = router.step(kind, self, x, mask, cache) if router else None
        if router is None or step is None:
            return decided(stock, self, x, attn_scale, mask, cache)
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
