"""Where the command starts: Ctrl-C while modules load, and output that nobody takes."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from mla_tuner import __main__, cli


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a Linux device")
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["db", "path"], ["probe", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_line(args: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mla_tuner", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
        )
    assert done.returncode == 1
    *notes, last = done.stderr.splitlines()
    assert last == "Error: cannot write the output: No space left on device"
    assert "Traceback" not in notes


def test_ctrl_c_while_modules_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mla_tuner.cli", Loading("mla_tuner.cli"))
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == "Error: interrupted"


def test_an_error_of_a_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(**options: object) -> None:
        raise PermissionError(13, "Permission denied", "some file")

    monkeypatch.setattr(cli, "main", command)
    with pytest.raises(PermissionError):
        __main__.main()
