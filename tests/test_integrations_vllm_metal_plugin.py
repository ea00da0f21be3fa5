"""Binding to vllm-metal, by hand and as a plugin of vLLM, and giving it back."""

from __future__ import annotations

import atexit
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from serving_steps import StubPolicy
from vllm_steps import CLASS, LAYERS, MODULE, Server, engine_as_it_is, mla_layers, stand_in

from mla_tuner.integrations import vllm_metal
from mla_tuner.integrations.vllm_metal import install, register, stats, uninstall
from mla_tuner.plan import MLX

pytestmark = pytest.mark.usefixtures("kernel")

METHODS = ("_can_use_kernel", "_kernel_fast_path_single_pass")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engine = stand_in(monkeypatch)
    with engine_as_it_is(engine):
        yield engine


@pytest.fixture(scope="module")
def layers() -> list[Any]:
    return mla_layers()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> set[Callable[[], None]]:
    """What would run when the process ends."""
    asked: set[Callable[[], None]] = set()
    monkeypatch.setattr(atexit, "register", asked.add)
    monkeypatch.setattr(atexit, "unregister", asked.discard)
    return asked


def bound(engine: Any) -> list[Any]:
    return [vars(engine.MLAPagedAttentionWrapper)[name] for name in METHODS]


# --- in and out


def test_uninstall_gives_back_what_was_there(engine: Any, layers: list[Any]) -> None:
    before = bound(engine)
    install(StubPolicy())
    assert not set(bound(engine)) & set(before)
    uninstall()
    assert bound(engine) == before
    uninstall()
    Server(engine, layers).decode(1)
    assert stats().routed == 0


def test_a_second_install_changes_the_policy_alone(engine: Any, layers: list[Any]) -> None:
    install(StubPolicy(MLX))
    ours = bound(engine)
    Server(engine, layers).decode(1)
    install(StubPolicy())
    install()
    assert bound(engine) == ours
    Server(engine, layers).decode(1)
    assert stats().plans == {"split x2": LAYERS}
    assert stats().reasons == {"the plan is mlx (tuned)": LAYERS}


def test_the_counts_stay_after_uninstall(engine: Any, layers: list[Any]) -> None:
    install(StubPolicy())
    Server(engine, layers).decode(1)
    uninstall()
    assert stats().routed == LAYERS
    assert stats().classes == {CLASS: "routed"}


def wrap_foreign(engine: Any) -> list[str]:
    """Someone else's wrappers around whatever is bound; notes what they pass on."""
    owner, calls = engine.MLAPagedAttentionWrapper, []

    def foreign(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return inner(*arguments)

        return call

    for name in METHODS:
        setattr(owner, name, foreign(name, vars(owner)[name]))
    return calls


def test_a_wrapper_that_was_there_before_keeps_its_calls(engine: Any, layers: list[Any]) -> None:
    calls = wrap_foreign(engine)
    theirs = bound(engine)
    why = "the source of its _can_use_kernel is not the known one"
    assert install(StubPolicy()).classes == {CLASS: why}
    assert bound(engine) == theirs
    Server(engine, layers).decode(1)
    assert calls == ["_can_use_kernel"] * LAYERS


def test_a_wrapper_that_came_later_survives(engine: Any, layers: list[Any]) -> None:
    install(StubPolicy())
    calls = wrap_foreign(engine)
    theirs = bound(engine)
    uninstall()
    assert bound(engine) == theirs
    Server(engine, layers).decode(1)
    assert (calls, stats().routed) == (["_can_use_kernel"] * LAYERS, 0)
    install(StubPolicy())
    Server(engine, layers).decode(1)
    assert stats().routed == LAYERS
    assert calls[LAYERS:] == [*METHODS] * LAYERS


@pytest.mark.parametrize("name", ["__call__", *METHODS])
def test_another_release_is_left_alone(
    engine: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(vllm_metal._KNOWN, name, "0123456789abcdef")
    before = bound(engine)
    with caplog.at_level(logging.INFO, "mla_tuner"):
        install(StubPolicy())
    assert bound(engine) == before
    line = f"vllm-metal's {CLASS} is not routed: the source of its {name} is not the known one"
    assert caplog.messages == [line]


def module_with(**attributes: Any) -> ModuleType:
    module = ModuleType(MODULE)
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "ModuleNotFoundError: "),
        (module_with(), "AttributeError: "),
        (module_with(**{CLASS: None}), "it is no class"),
        (module_with(**{CLASS: lambda inner: inner}), "it is no class"),
        (module_with(**{CLASS: int}), "the source of its __call__ is not the known one"),
    ],
    ids=["missing", "without the class", "nothing", "a function", "another class"],
)
def test_without_vllm_metal_nothing_happens(
    module: ModuleType | None,
    says: str,
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, module)
    with caplog.at_level(logging.INFO, "mla_tuner"):
        register()
        register()
    (line,) = caplog.messages
    assert line.startswith(f"vllm-metal's {CLASS} is not routed: {says}")
    assert [*stats().classes] == [CLASS]


# --- as a plugin


def test_the_entry_point_is_declared() -> None:
    project = (Path(vllm_metal.__file__).parents[2] / "pyproject.toml").read_text()
    (target,) = re.findall(r'entry-points\."vllm\.general_plugins"\]\nmla_tuner = "(.*)"', project)
    assert target == f"{register.__module__}:{register.__name__}"


def test_register_routes_by_the_policy_of_the_process(
    engine: Any, layers: list[Any], at_exit: set[Any]
) -> None:
    register()
    Server(engine, layers).decode(1)
    assert stats().reasons == {"the plan is mlx (gates)": LAYERS}
    assert at_exit == set()


def test_off_installs_nothing(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLA_TUNER", "OFF")
    before = bound(engine)
    with caplog.at_level(logging.INFO, "mla_tuner"):
        register()
    assert bound(engine) == before
    assert caplog.messages == ["MLA_TUNER=off: nothing is installed in vllm-metal"]
    assert stats().classes == {CLASS: "MLA_TUNER=off"}


def test_off_that_comes_later_does_not_hide_what_is_installed(
    engine: Any,
    layers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(StubPolicy())
    Server(engine, layers).decode(1)
    monkeypatch.setenv("MLA_TUNER", "off")
    with caplog.at_level(logging.INFO, "mla_tuner"):
        assert install() == stats()
    assert (stats().classes, stats().routed) == ({CLASS: "routed"}, LAYERS)
    assert caplog.messages == []


def test_log_prints_the_counts_when_the_process_ends(
    engine: Any,
    at_exit: set[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLA_TUNER", "log")
    register()
    register()
    (ending,) = at_exit
    ending()
    assert capsys.readouterr().err == "vllm-metal: 0 calls routed, 0 stock, 0 look-ups\n"


def test_force_runs_our_kernels_whatever_the_plan(
    engine: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_TUNER", "force")
    install(StubPolicy(MLX))
    Server(engine, layers).decode(1)
    (plan,) = stats().plans
    assert plan.startswith(("single", "split"))
    assert stats().routed == LAYERS


def test_an_unknown_mode_is_ignored_with_a_line(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLA_TUNER", "0")
    with caplog.at_level(logging.WARNING, "mla_tuner"):
        register()
    assert caplog.messages == ["MLA_TUNER='0' is none of off, log, force: it is ignored"]
    assert stats().classes == {CLASS: "routed"}


def test_misses_are_counted_for_the_tuner(engine: Any, layers: list[Any]) -> None:
    install()
    Server(engine, layers, (1000, 900)).decode(2)
    (bucket,) = stats().misses
    assert (bucket.context, bucket.batch, bucket.layout) == (1024, 2, "paged")
    assert stats().misses[bucket] == 2


def test_lines_go_where_those_of_vllm_go(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("mla_tuner")
    monkeypatch.setattr(theirs, "handlers", [caplog.handler])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    changed = {"handlers": [], "level": logging.NOTSET, "propagate": True, "_cache": {}}
    for name, value in changed.items():
        monkeypatch.setattr(ours, name, value)
    register()
    assert caplog.messages == [f"vllm-metal's {CLASS} decodes through mla-tuner"]
