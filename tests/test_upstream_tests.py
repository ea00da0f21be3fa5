"""The tool that runs vllm-metal's own tests through our operation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mla_tuner.integrations import vllm_metal
from mla_tuner.plan import Plan
from tools import upstream_tests
from tools.upstream_tests import FILES, ThroughOurs, partitions, run


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    vllm_metal.uninstall()


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Error: no checkout of vllm-metal: .*test_mla_kernel.py"):
        run(tmp_path, Plan("single"))


def test_a_checkout_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    for name in FILES:
        (tmp_path / "tests" / name).touch()
    monkeypatch.setitem(sys.modules, "vllm_metal.attention.impls.mla", None)
    with pytest.raises(SystemExit, match="MLAPagedAttentionWrapper is not routed: ModuleNotFound"):
        run(tmp_path, Plan("single"))


@pytest.mark.parametrize(("text", "plan"), [("1", Plan("single")), ("8", Plan("split", 8))])
def test_plans(text: str, plan: Plan) -> None:
    assert partitions(text) == plan


@pytest.mark.parametrize("text", ["0", "-2", "x", "257"])
def test_no_plan(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["upstream_tests", "--checkout", ".", "--partitions", text])
    with pytest.raises(SystemExit) as ended:
        upstream_tests.main()
    assert ended.value.code == 2
    assert f"invalid partitions value: '{text}'" in capsys.readouterr().err


def report(when: str, outcome: str) -> Any:
    return SimpleNamespace(when=when, outcome=outcome)


def test_a_test_counts_once() -> None:
    ours = ThroughOurs(Plan("single"))
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "passed")):
        ours.pytest_runtest_logreport(report(when, outcome))
    ours.pytest_runtest_logreport(report("setup", "skipped"))
    ours.pytest_runtest_logreport(report("setup", "failed"))
    assert ours.outcomes == {"passed": 1, "skipped": 1, "failed": 1}


@pytest.mark.usefixtures("kernel")
def test_what_was_executed_is_counted() -> None:
    ours = ThroughOurs(Plan("split", 2))
    ours.operation(
        *(mx.ones((1, 4, 512), mx.float16), mx.ones((1, 4, 64), mx.float16)),
        latent_cache=mx.ones((8, 16, 576), mx.float16),
        block_tables=mx.arange(8)[None],
        context_lens=[128],
        cu_seqlens_q=mx.arange(2),
        scale=1.0,
    )
    assert ours.native == 1
    assert [*ours.executed] == ["split x2 r16"]


@pytest.mark.usefixtures("kernel")
def test_all_of_vllm_metals_tests_pass() -> None:
    checkout = os.environ.get("VLLM_METAL_CHECKOUT", "")
    if not checkout:
        pytest.skip("no checkout of vllm-metal: VLLM_METAL_CHECKOUT names none")
    command = [sys.executable, "-m", "tools.upstream_tests", "--checkout", checkout]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "75 of 75 tests pass" in done.stdout
