"""Where the compiled kernel is missing, its tests say so; where a compiler is, they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT_KERNEL = """
import sys
sys.modules["mla_tuner._native"] = sys.modules["mla_tuner._build_info"] = None
"""
TESTS = ["tests/test_native.py", "tests/conformance", "tests/test_verify.py"]


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_a_missing_kernel_is_skipped_or_fails(required: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "without_kernel.py").write_text(WITHOUT_KERNEL)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "without_kernel",
            "-rs",
            "-k",
            "isa or every",
            *TESTS,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MLA_TUNER_REQUIRE_NATIVE": required},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout
    assert "the compiled kernel is not built: " in done.stdout
    assert (" skipped" in done.stdout) == (not required)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not here")
@pytest.mark.parametrize("compiler", ["", "c++", "g++", "clang++"])
def test_make_requires_the_kernel_where_a_compiler_is(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "make").symlink_to(shutil.which("make") or "")
    if compiler:
        (tmp_path / compiler).write_text("")
        (tmp_path / compiler).chmod(0o755)
    done = subprocess.run(
        ["make", "-n", "unit"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("MLA_TUNER_REQUIRE_NATIVE=1" in done.stdout) == bool(compiler)
