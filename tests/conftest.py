"""What every test gets: no tuning table of the user's, and a policy of its own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mla_tuner import backends, policy


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLA_TUNER", "MLA_TUNER_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLA_TUNER_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr(policy, "_current", None)


def pytest_report_header() -> str:
    able, reason = backends.get("cpu").available()
    kernel = f"kernel {backends.get('cpu').digest()}" if able else reason
    return f"mlx {vars(mx)['__version__']} on {mx.default_device()}; CPU: {kernel}"
