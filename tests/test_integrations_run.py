"""`mla-tune run`, and what MLA_TUNER says to everything that serves."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from commands import error, run
from serving_steps import KINDS, StubPolicy, attention_class, decode, distance

from mla_tuner import last_run, modes
from mla_tuner.errors import TunerError
from mla_tuner.integrations import mlx_lm, switch
from mla_tuner.integrations import run as run_module
from mla_tuner.integrations.absorb import CLASSES as ABSORBABLE
from mla_tuner.integrations.counts import read_misses
from mla_tuner.integrations.mlx_lm import install, patch, stats
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import bucket_of

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")


# --- the command


class Command:
    """A module of mlx-lm whose `main` notes what it was called with."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.raises = raises
        self.seen: list[str] = []

    def main(self) -> None:
        self.seen = list(sys.argv)
        if self.raises:
            raise self.raises


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    made = Command()
    monkeypatch.setattr(run_module, "import_module", lambda name: made)
    return made


@pytest.mark.parametrize("dashes", [["--"], []])
def test_run_installs_and_passes_the_command_line_on(command: Command, dashes: list[str]) -> None:
    before = list(sys.argv)
    run("run", *dashes, "mlx_lm.server", "--model", "m", "--absorb", "--help")
    assert command.seen == ["mlx_lm.server", "--model", "m", "--absorb", "--help"]
    assert sys.argv == before
    assert stats().classes["deepseek_v3.DeepseekV3Attention"] == "routed"
    assert not mlx_lm._absorbs


def test_run_may_absorb(command: Command) -> None:
    run("run", "--absorb", "mlx_lm.server")
    assert mlx_lm._absorbs


def test_run_writes_what_was_missed(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However the command ends: a server is stopped by Ctrl-C."""
    monkeypatch.setenv("MLA_TUNER_DB", str(tmp_path / "t.db"))
    missed = bucket_of(4096, 1, 16, "bfloat16")

    def main() -> None:
        assert mlx_lm._router
        mlx_lm._router.stats.misses[missed] += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "main", main)
    result = run("run", "--write-misses", "--", "mlx_lm.server", code=130)
    (file,) = tmp_path.glob("misses-*.json")
    assert result.stderr == f"misses: {file}\n"
    assert read_misses(file) == [missed]
    file.unlink()
    run("run", "mlx_lm.server", code=130)
    mlx_lm.uninstall()
    monkeypatch.setattr(command, "main", lambda: None)
    assert run("run", "--write-misses", "mlx_lm.server").stderr == "misses: none\n"
    assert not [*tmp_path.iterdir()]


def test_an_exit_code_goes_through(command: Command) -> None:
    command.raises = SystemExit(3)
    run("run", "mlx_lm.generate", code=3)


def test_ctrl_c_ends_as_it_does_in_a_shell(command: Command) -> None:
    command.raises = KeyboardInterrupt()
    assert run("run", "mlx_lm.generate", code=130).output == ""


def test_trouble_of_the_command_is_shown_as_python_shows_it(command: Command) -> None:
    command.raises = OSError(98, "Address already in use")
    result = run("run", "mlx_lm.server", code=1)
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("OSError: [Errno 98] Address already in use\n")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("antigravity", "antigravity is no command of mlx-lm: mlx_lm.server, "),
        ("mlx_lm.models.cache", "mlx_lm.models.cache is no command that can run here: "),
        ("mlx_lm.nothing", "mlx_lm.nothing is no command that can run here: No module named"),
    ],
)
def test_run_refuses_what_is_no_command(name: str, says: str) -> None:
    assert error("run", "--", name).startswith(says)
    assert stats().classes == {}


class Absent:
    """Hides mlx-lm from imports."""

    @staticmethod
    def find_spec(name: str, *more: object) -> None:
        if name.split(".")[0] == "mlx_lm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["mlx_lm.server", "mlx_lm.generate", "mlx_lm.nothing", "mlx_lm"])
def test_without_mlx_lm_run_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as absent:
        for known in [each for each in sys.modules if each.split(".")[0] == "mlx_lm"]:
            absent.delitem(sys.modules, known)
        absent.setattr(sys, "meta_path", [Absent, *sys.meta_path])
        assert error("run", "--", name) == "mlx-lm is not here: pip install 'mla-tuner[mlx-lm]'"
    assert stats().classes == {}


def test_run_wants_a_command() -> None:
    assert error("run", code=2).startswith("give a command of mlx-lm")


def test_mlx_lm_is_imported_once_it_is_needed() -> None:
    asked = "import sys, mla_tuner.cli; sys.exit('mlx_lm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


# --- MLA_TUNER


def test_off_installs_nothing(
    deepseek: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLA_TUNER", "OFF")
    caplog.set_level(logging.INFO, "mla_tuner")
    call = type(deepseek.layers[0].self_attn).__call__
    with patch(StubPolicy(), absorb=True):
        assert type(deepseek.layers[0].self_attn).__call__ is call
        decode(deepseek, 1, None, (1,))
    assert stats().routed == stats().stock == 0
    assert set(stats().classes.values()) == {"MLA_TUNER=off"}
    assert caplog.messages == ["MLA_TUNER=off: nothing is installed in mlx-lm"]


def test_off_after_an_install_tells_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = install(StubPolicy(MLX)).classes
    monkeypatch.setenv("MLA_TUNER", "off")
    assert install().classes == classes == stats().classes


def test_log_prints_the_counts_at_the_end(
    deepseek: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr(mlx_lm.atexit, "register", at_end.append)
    monkeypatch.setattr(mlx_lm.atexit, "unregister", lambda old: at_end.clear())
    monkeypatch.setenv("MLA_TUNER", "log")
    for _ in range(2):
        with patch(StubPolicy()):
            decode(deepseek, 1, None, (1,))
    (show,) = at_end
    show()
    assert capsys.readouterr().err.startswith("2 calls routed, 2 stock, 1 look-up\n  2 by split")


def test_log_says_why_where_nothing_was_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = KINDS["mistral4"]
    monkeypatch.setattr(attention_class("mistral4"), "__call__", lambda *arguments: None)
    install(StubPolicy())
    mlx_lm._print_counts()
    absorbable = ", ".join(f"{kind.module}.{kind.name}" for kind in ABSORBABLE)
    assert capsys.readouterr().err.splitlines() == [
        "0 calls routed, 0 stock, 0 look-ups",
        f"  {owner.module}.{owner.name}: its source is not the known one",
        f"  {absorbable}: routed once it is absorbed",
    ]


@pytest.mark.parametrize("policy", [None, StubPolicy(MLX)])
def test_force_runs_our_kernel_where_the_plan_is_mlx(
    policy: StubPolicy | None,
    deepseek: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLA_TUNER", "force")
    case = 2, None, (1, 1, 4)
    theirs = decode(deepseek, *case)
    with patch(policy):
        ours = decode(deepseek, *case)
    assert distance(ours, theirs) < 1e-4
    assert stats().routed == 6
    assert all(name.startswith(("single", "split")) for name in stats().plans)
    ran = last_run()
    assert ran is not None
    assert ran.executed is not None
    source = "tuned" if policy else "gates"
    assert ran.decision.reason == f"MLA_TUNER=force: instead of mlx ({source})"
    line = "MLA_TUNER=force: our kernels run wherever they can, faster or not"
    assert caplog.messages[0] == line


def test_force_keeps_a_native_plan(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "force")
    with patch(StubPolicy(Plan("single"))):
        decode(deepseek, 1, None, (1,))
    assert stats().plans == {"single": 2}


def test_force_leaves_what_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "candidates", lambda *asked: [MLX])
    decision = switch.Forced(StubPolicy(MLX)).decide(2048, 1, 16, "bfloat16")  # type: ignore[arg-type]
    assert (decision.plan, decision.source) == (MLX, "tuned")


@pytest.mark.parametrize("text", ["0", "false", "on", " off"])
def test_another_value_is_said_and_ignored_by_code_and_refused_by_the_command(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: Command
) -> None:
    monkeypatch.setenv("MLA_TUNER", text)
    with pytest.raises(TunerError, match="none of off, log, force"):
        modes.mode()
    assert error("run", "mlx_lm.server") == f"MLA_TUNER={text!r} is none of off, log, force"
    assert not command.seen
    assert install(StubPolicy()).classes["deepseek_v3.DeepseekV3Attention"] == "routed"
    assert caplog.messages == [f"MLA_TUNER={text!r} is none of off, log, force: it is ignored"]


@pytest.mark.parametrize("text", ["", "off", "Log", "FORCE"])
def test_known_values_in_any_case(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", text)
    assert modes.mode() == text.lower()
