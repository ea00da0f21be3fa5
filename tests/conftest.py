"""What every test gets: no tuning tables but its own, and a policy of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from fakes import FakeBackend, FakeRunners

from mla_tuner import backends, bench, family, modes, overview, policy, tuner, verify
from mla_tuner import device as devices
from mla_tuner.plan import MLX
from mla_tuner.store import Store

mx.set_default_device(mx.cpu)  # also where MLX would take a GPU: a test of another device says so


native: Any = import_module("mla_tuner._native") if backends.get("cpu").available()[0] else None


@pytest.fixture(params=native.isas() if native else ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that the CPU kernel has here, in use."""
    native.set_isa(request.param)
    yield request.param
    native.set_isa("")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLA_TUNER", "MLA_TUNER_FROZEN", "MLA_TUNER_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLA_TUNER_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr(family, "FOLDERS", (tmp_path / "no tables",))  # else these decide
    monkeypatch.setattr(policy, "_current", None)
    monkeypatch.setattr(modes, "_said", set())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty database, for tuning with `FakeBackend`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of this test alone
    monkeypatch.setattr(tuner.backends, "get", lambda name: FakeBackend())
    with Store(tmp_path / "t.db") as store:
        yield store


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunners:
    """A CPU on which mlx takes 9 ms, other paths 1 ms, and split 1 ms over its partitions."""
    runners = FakeRunners(lambda shape, plan: 9e-3 if plan == MLX else 1e-3 / plan.partitions)
    for module in (tuner, bench, verify):
        monkeypatch.setattr(module, "IsolatedRunners", lambda device: runners)
    monkeypatch.setattr(backends, "get", lambda name: FakeBackend(name=name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of this test alone
    monkeypatch.setattr(devices, "use", lambda device: None)
    monkeypatch.setattr(tuner, "settle", lambda device, **options: {})
    return runners


@pytest.fixture
def no_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the kernel check to its own tests: a fake has no kernel."""
    monkeypatch.setattr(verify, "conformance_subset", lambda backend: [])
    monkeypatch.setattr(verify, "settle", lambda device, force: {})
    for module in (verify, overview):
        monkeypatch.setattr(module, "kernels", lambda backend: [])


@pytest.fixture(scope="session")
def kernel() -> None:
    """For tests that mean to run the compiled kernel: skips them, or fails where it is required."""
    able, reason = backends.get("cpu").available()
    if not able:
        leave(f"the compiled kernel is not built: {reason}")


@pytest.fixture
def stock_mlx_lm() -> Iterator[None]:
    """mlx-lm as nobody has touched it, before and after the test."""
    from serving_steps import mlx_lm_as_it_is  # needs mlx-lm, which may be missing

    with mlx_lm_as_it_is():
        yield


@pytest.fixture(scope="module")
def deepseek() -> Any:
    """A tiny model of mlx-lm's."""
    from tiny_models import tiny_model  # as above

    return tiny_model("deepseek_v3")


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests that compile C++ themselves; the names are those that the Makefile looks for."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if not any(name and shutil.which(name) for name in names):
        leave("no C++ compiler was found")


def leave(reason: str) -> None:
    required = os.environ.get("MLA_TUNER_REQUIRE_NATIVE") == "1"
    (pytest.fail if required else pytest.skip)(reason)


def pytest_report_header() -> str:
    able, reason = backends.get("cpu").available()
    kernel = f"kernel {backends.get('cpu').digest()}" if able else reason
    return f"mlx {vars(mx)['__version__']} on {mx.default_device()}; CPU: {kernel}"
