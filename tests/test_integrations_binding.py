"""Binding to mlx-lm and giving it back; and `run`, which binds for a command."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models.cache import BatchKVCache, KVCache
from serving_steps import KINDS, StubPolicy, attention_class, decode, mlx_lm_as_it_is
from tiny_models import tiny_model

from mla_tuner.integrations import mlx_lm
from mla_tuner.integrations import run as run_module
from mla_tuner.integrations.mla_classes import fingerprint
from mla_tuner.integrations.mlx_lm import install, patch, stats, uninstall
from mla_tuner.plan import MLX

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with mlx_lm_as_it_is():
        yield


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return tiny_model("deepseek_v3")


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
    assert stats().classes["DeepseekV3Attention"] == "its source is not the known one"


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


def test_a_class_of_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = attention_class("mistral4")

    def other(self: Any, x: Any, attn_scale: Any, mask: Any = None, cache: Any = None) -> Any:
        return x

    monkeypatch.setattr(owner, "__call__", other)
    with patch(StubPolicy()):
        assert vars(owner)["__call__"] is other
    assert stats().classes["Mistral4Attention"] == "its source is not the known one"
    assert stats().classes["DeepseekV3Attention"] == "routed"


def test_a_release_without_a_model_or_without_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(mlx_lm.importlib, "import_module", missing)
    classes = install(StubPolicy()).classes
    assert set(map(str, classes.values())) == {
        f"ModuleNotFoundError: No module named 'mlx_lm.models.{name}'" for name in KINDS
    }


def test_a_function_without_source_has_no_fingerprint() -> None:
    assert fingerprint(len) == ""
    assert fingerprint(None) == ""
    assert fingerprint(eval("lambda: 1")) == ""


# --- as a command


class Command:
    """A module of mlx-lm whose `main` notes what it was called with."""

    seen: list[str] | None = None

    @classmethod
    def main(cls) -> None:
        cls.seen = list(sys.argv)
        raise SystemExit(3)


def test_run_installs_and_passes_the_command_line_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "import_module", lambda name: Command)
    monkeypatch.setenv("MLA_TUNER", "log")
    before = list(sys.argv)
    with pytest.raises(SystemExit) as ended:
        run_module.run(["mlx_lm.server", "--model", "m"])
    assert ended.value.code == 3
    assert Command.seen == ["mlx_lm.server", "--model", "m"]
    assert sys.argv == before
    assert stats().classes["DeepseekV3Attention"] == "routed"
    assert capsys.readouterr().err == "0 calls routed, 0 stock, 0 look-ups\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage: "),
        (["antigravity"], "usage: "),
        (["mlx_lm.models.cache"], "is no command that can run here"),
        (["mlx_lm.nothing"], "is no command that can run here: No module named"),
    ],
)
def test_run_refuses_what_is_no_command(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit, match=f"Error: .*{says}"):
        run_module.main()
    assert stats().classes == {}
