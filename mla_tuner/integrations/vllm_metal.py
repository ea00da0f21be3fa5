"""vllm-metal decodes MLA models through the tuned plan: a plugin of vLLM, or `install()`."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..modes import known_mode
from .bindings import Bindings
from .counts import Stats
from .mla_classes import fingerprint
from .vllm_routing import Forward, PagedRouter

if TYPE_CHECKING:
    from ..policy import Policy

log = logging.getLogger("mla_tuner")
ROUTED = "routed"
_MODULE, _CLASS = "vllm_metal.attention.impls.mla", "MLAPagedAttentionWrapper"
_ADMIT, _RUN = "_can_use_kernel", "_kernel_fast_path_single_pass"
# Digests of the methods that this module was written for: those two, and the one that calls them.
_KNOWN = {
    "__call__": "d89563e55ac34319",
    _ADMIT: "d2c6701e9d4bc91d",
    _RUN: "a5811798a798d222",
}

_lock = threading.Lock()
_router: PagedRouter | None = None  # None: our methods pass every call on
_last = Stats(engine="vllm-metal")
_bindings = Bindings()


def register() -> None:
    """The entry point of `vllm.general_plugins`: `install` in each process of vLLM."""
    _log_as_vllm()
    install()


def install(policy: Policy | None = None) -> Stats:
    """Route the decode of vllm-metal's MLA models, wrapped or not, in this process.

    policy: decides the plans; without it the policy of this process does. A second call only
    changes the policy.

    Returns the counts, whose `classes` say what is routed. Where vllm-metal is missing or of
    unknown source nothing changes, and that is one log line, never an error. With MLA_TUNER=off
    nothing is installed; `log` prints the counts when the process ends, and `force` runs our
    kernels wherever they can.
    """
    global _router, _last
    wanted = known_mode()
    with _lock:
        if wanted == "off" and _router is None:
            log.info("MLA_TUNER=off: nothing is installed in vllm-metal")
            _last = Stats(classes={_CLASS: "MLA_TUNER=off"}, engine=_last.engine)
            return _last.copy()
        if _router is None:
            _router = _installed(policy, wanted)
        elif policy is not None:
            _router = _router.renewed(policy)
        return _router.stats.copy()


def uninstall() -> None:
    """Give vllm-metal its methods back. What others have wrapped since stays, and passes on."""
    global _router, _last
    with _lock:
        if _router is not None:
            _last, _router = _router.stats, None
        _bindings.release()  # again, too: whoever had wrapped ours may have given it back since


def stats() -> Stats:
    """The counts since `install`; after `uninstall` the last ones. A copy."""
    router = _router
    return (_last if router is None else router.stats).copy()


def _installed(policy: Policy | None, wanted: str) -> PagedRouter:
    """A router, with the methods bound that call it."""
    router = PagedRouter(policy, force=wanted == "force")
    why = _bind_wrapper()
    router.stats.classes = {_CLASS: why}
    if why != ROUTED:
        log.info("vllm-metal's %s is not routed: %s", _CLASS, why)
        return router
    log.info("vllm-metal's %s decodes through mla-tuner", _CLASS)
    if router.force:
        log.warning("MLA_TUNER=force: our kernels run wherever they can, faster or not")
    if wanted == "log":
        atexit.unregister(_print_counts)  # once, however often this is installed
        atexit.register(_print_counts)
    return router


def _print_counts() -> None:
    print(f"vllm-metal: {stats()}", file=sys.stderr)


def _bind_wrapper() -> str:
    """Bind our methods to the wrapper; returns `ROUTED` or why not."""
    try:
        owner = getattr(importlib.import_module(_MODULE), _CLASS)
    except Exception as error:  # a broken install fails in many ways
        return f"{type(error).__name__}: {error}"
    if not isinstance(owner, type):
        return "it is no class"
    if (owner, _RUN) in _bindings:  # left behind, because others have wrapped it
        return ROUTED
    for name, known in _KNOWN.items():
        if fingerprint(vars(owner).get(name)) != known:
            return f"the source of its {name} is not the known one"
    _bindings.bind(owner, _ADMIT, _admitting(vars(owner)[_ADMIT]))
    _bindings.bind(owner, _RUN, _running(vars(owner)[_RUN]))
    return ROUTED


def _admitting(stock: Callable[..., bool]) -> Callable[..., bool]:
    """Says yes where a plan of ours is to run, and else what vllm-metal says."""

    @functools.wraps(stock)
    def can_use_kernel(self: Any, inner: Any, latent_cache: Any, ctx: Any) -> bool:
        router = _router
        if router and router.admits(self, inner, latent_cache, ctx):
            return True
        return stock(self, inner, latent_cache, ctx)

    return can_use_kernel


def _running(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Attention of one new token a row: `[1, rows, heads * v_head_dim]`."""

    @functools.wraps(stock)
    def fast_path(
        self: Any,
        inner: Any,
        latent_cache: Any,
        layer_idx: int,
        q_nope: mx.array,  # [1, heads, rows, qk_nope_head_dim]
        q_pe: mx.array,  # [1, heads, rows, qk_rope_head_dim], rotated
        ctx: Any,
        seq_len: int,
    ) -> mx.array:
        router = _router
        forward = router.forward(self, inner, latent_cache, ctx) if router else None
        if router is None or not isinstance(forward, Forward):
            return stock(self, inner, latent_cache, layer_idx, q_nope, q_pe, ctx, seq_len)
        queries = _by_row(inner.embed_q(q_nope), latent_cache), _by_row(q_pe, latent_cache)
        scale = self._attention_scale()
        out = router.attend(forward, inner, latent_cache, layer_idx, queries, ctx, scale)
        heads: mx.array = inner.unembed_out(out.transpose(2, 1, 0, 3))
        return heads.transpose(0, 2, 1, 3).flatten(2)  # from [1, heads, rows, v_head_dim]

    return fast_path


def _by_row(q: mx.array, latent_cache: Any) -> mx.array:
    """From `[1, heads, rows, width]` to `[rows, heads, 1, width]` in the cache's dtype."""
    return q.astype(latent_cache.dtype).transpose(2, 1, 0, 3)


def _log_as_vllm() -> None:
    """vLLM configures its own loggers alone: what we say goes where its lines go."""
    theirs = logging.getLogger("vllm")
    if theirs.handlers and not log.handlers:
        log.handlers.extend(theirs.handlers)
        log.setLevel(theirs.level)
        log.propagate = False
