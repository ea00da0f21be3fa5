"""Binding to mlx-lm and giving it back."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models.cache import BatchKVCache, KVCache
from serving_steps import KINDS, StubPolicy, attention_class, decode
from tiny_models import FULL_CONFIGS

from mla_tuner.integrations import mlx_lm
from mla_tuner.integrations.mla_classes import fingerprint
from mla_tuner.integrations.mlx_lm import install, patch, stats, uninstall
from mla_tuner.plan import MLX

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")


# --- in and out


def test_uninstall_gives_back_what_was_there(deepseek: Any) -> None:
    owners = [attention_class(name) for name in KINDS]
    before = [vars(owner)["__call__"] for owner in owners]
    masks = KVCache.make_mask, BatchKVCache.make_mask
    install(StubPolicy())
    assert all(vars(owner)["__call__"] not in before for owner in owners)
    uninstall()
    assert [vars(owner)["__call__"] for owner in owners] == before
    assert (KVCache.make_mask, BatchKVCache.make_mask) == masks
    uninstall()


def test_a_second_uninstall_takes_out_what_others_had_kept(deepseek: Any) -> None:
    """Their wrapper was around ours at the first, and then gave ours back."""
    owner = attention_class("deepseek_v3")
    stock = vars(owner)["__call__"]
    install(StubPolicy())
    ours = vars(owner)["__call__"]
    owner.__call__ = lambda *arguments, **options: ours(*arguments, **options)
    uninstall()
    owner.__call__ = ours
    uninstall()
    assert vars(owner)["__call__"] is stock


def test_a_policy_without_rows_of_its_own_decides(deepseek: Any) -> None:
    """One that lives by a shared table has the length 0."""

    class Empty(StubPolicy):
        def __len__(self) -> int:
            return 0

    install(policy := Empty())
    decode(deepseek, 1, None, (1,))
    assert policy.asked
    assert stats().routed == 2


def test_a_second_install_changes_the_policy_alone(deepseek: Any) -> None:
    install(StubPolicy(MLX))
    bound = vars(attention_class("deepseek_v3"))["__call__"]
    decode(deepseek, 1, None, (1,))
    install(StubPolicy())
    install()
    assert vars(attention_class("deepseek_v3"))["__call__"] is bound
    decode(deepseek, 1, None, (1,))
    assert stats().plans == {"split x2": 2}
    assert stats().reasons["the plan is mlx (tuned)"] == 2


def test_a_dropped_handle_changes_nothing(deepseek: Any) -> None:
    patch(StubPolicy()).__enter__()
    gc.collect()
    decode(deepseek, 1, None, (1,))
    assert stats().routed == 2


def test_an_inner_block_leaves_an_outer_one_in_force(deepseek: Any) -> None:
    with patch(StubPolicy()):
        with patch():
            pass
        decode(deepseek, 1, None, (1,))
    assert stats().routed == 2
    decode(deepseek, 1, None, (1,))
    assert stats().routed == 2


@pytest.mark.parametrize("first", [0, 1])
def test_of_blocks_that_overlap_the_last_to_end_uninstalls(first: int, deepseek: Any) -> None:
    blocks = [patch(StubPolicy()), patch()]
    stock = vars(attention_class("deepseek_v3"))["__call__"]
    for block in blocks:
        block.__enter__()
    blocks[first].__exit__()
    decode(deepseek, 1, None, (1,))
    assert stats().routed == 2
    blocks[1 - first].__exit__()
    assert vars(attention_class("deepseek_v3"))["__call__"] is stock


def test_a_block_ends_neither_an_install_nor_what_came_after_an_uninstall(deepseek: Any) -> None:
    early, late = patch(StubPolicy()), patch(StubPolicy())
    early.__enter__()
    install()
    early.__exit__()
    decode(deepseek, 1, None, (1,))
    assert stats().routed == 2
    early.__enter__()
    uninstall()
    with late:
        early.__exit__()
        decode(deepseek, 1, None, (1,))
    assert stats().routed == 2


def wrap_foreign() -> list[int]:
    """Someone else's wrapper around whatever is bound; counts its calls."""
    owner, calls = attention_class("deepseek_v3"), [0]
    inner = vars(owner)["__call__"]

    def foreign(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return inner(*arguments, **options)

    foreign.__wrapped__ = inner
    owner.__call__ = foreign
    return calls


def test_a_wrapper_that_was_there_before_keeps_its_calls(deepseek: Any) -> None:
    calls = wrap_foreign()
    with patch(StubPolicy()):
        decode(deepseek, 1, None, (1,))
    assert calls == [4]
    assert stats().routed == 0
    assert stats().classes["deepseek_v3.DeepseekV3Attention"] == "its source is not the known one"


def test_a_wrapper_that_came_later_survives(deepseek: Any) -> None:
    install(StubPolicy())
    calls = wrap_foreign()
    foreign = vars(attention_class("deepseek_v3"))["__call__"]
    uninstall()
    assert vars(attention_class("deepseek_v3"))["__call__"] is foreign
    decode(deepseek, 1, None, (1,))
    assert (calls, stats().routed) == ([4], 0)
    install(StubPolicy())
    decode(deepseek, 1, None, (1,))
    assert (calls, stats().routed) == ([8], 2)


@pytest.mark.parametrize(
    "owner",
    [attention_class("deepseek_v3"), attention_class("deepseek_v2"), KVCache],
    ids=["attention", "absorbing", "mask"],
)
def test_what_another_replaced_and_gave_back_is_bound_anew(owner: Any) -> None:
    name = "make_mask" if owner is KVCache else "__call__"
    stock = vars(owner)[name]
    install(StubPolicy(), absorb=True)
    ours = vars(owner)[name]
    assert ours is not stock
    setattr(owner, name, lambda *arguments, **options: stock(*arguments, **options))
    uninstall()
    setattr(owner, name, stock)
    for _ in range(2):
        install(StubPolicy(), absorb=True)
        assert vars(owner)[name] not in (stock, ours)
        uninstall()
        assert vars(owner)[name] is stock


def test_a_class_of_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = attention_class("mistral4")

    def other(self: Any, x: Any, attn_scale: Any, mask: Any = None, cache: Any = None) -> Any:
        return x

    monkeypatch.setattr(owner, "__call__", other)
    with patch(StubPolicy()):
        assert vars(owner)["__call__"] is other
    assert stats().classes["mistral4.Mistral4Attention"] == "its source is not the known one"
    assert stats().classes["deepseek_v3.DeepseekV3Attention"] == "routed"


def test_classes_that_are_left_alone_are_a_log_line_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'mlx_lm'")

    caplog.set_level(logging.INFO, "mla_tuner")
    monkeypatch.setattr(mlx_lm.importlib, "import_module", missing)
    install(StubPolicy())
    (line,) = caplog.messages
    assert line.startswith("mlx-lm's deepseek_v3.DeepseekV3Attention, deepseek_v32.")
    assert line.endswith(": not routed: ModuleNotFoundError: No module named 'mlx_lm'")


def test_a_release_without_a_model_or_without_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(mlx_lm.importlib, "import_module", missing)
    classes = install(StubPolicy()).classes
    assert set(map(str, classes.values())) == {
        f"ModuleNotFoundError: No module named 'mlx_lm.models.{name}'"
        for name in (*KINDS, *FULL_CONFIGS, "base")
    }


def test_a_function_without_source_has_no_fingerprint() -> None:
    assert fingerprint(len) == ""
    assert fingerprint(None) == ""
    assert fingerprint(eval("lambda: 1")) == ""
