"""`mla-tune --storage`: what is printed, and that no password ever is."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import GRID, TUNE, answer, error, run
from fakes import FakeRunners

from mla_tuner import fleet_study
from mla_tuner.options import printable

SECRET = "s3cr3t"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fleet.db"


def test_a_second_machine_has_all_plans(fake: FakeRunners, tmp_path: Path, url: str) -> None:
    first = answer("--storage", url, *TUNE, "--db", str(tmp_path / "one.db"))
    assert (first["tuned"], first["already_tuned"], first["not_reached"]) == (2, 0, [])
    made = len(fake.made)
    second = run("--storage", url, *TUNE, "--db", str(tmp_path / "two.db"))
    assert len(fake.made) == made
    assert "Tuned by other machines, and fetched: 2." in second.stderr
    assert "0 buckets tuned in" in second.stdout
    plans = [
        answer(*TUNE, "--db", str(tmp_path / f"{name}.db"))["plans"] for name in ("one", "two")
    ]
    assert plans[0] == plans[1]
    assert len(plans[0]) == 2


def test_where_the_budget_ended_the_command_that_continues_has_no_password(
    fake: FakeRunners, url: str
) -> None:
    fake.seconds = lambda shape, plan: 1.0 if shape.context == 4096 else 1e-3
    found = answer("--storage", url, "--budget", "30s", *GRID)
    assert len(found["not_reached"]) == 1
    assert f"--storage {url}" in found["continue"]


@pytest.mark.parametrize(
    "url",
    [
        *(f"postgresql://u:{SECRET}@h/d", f"postgresql://u:{SECRET}@h:1/d?x=y", f"u:{SECRET}@h"),
        *(f"postgresql://h/d?password={SECRET}", f"postgresql://u:a/{SECRET}@h/d", SECRET),
        *(f"sqlite:///x?password={SECRET}", f"postgresql://{SECRET}:{SECRET}", f"a://b/c/{SECRET}"),
    ],
)
def test_a_url_that_may_hold_a_password_is_not_shown(url: str) -> None:
    for words in (["--storage", url], [f"--storage={url}"]):
        assert SECRET not in printable(["mla-tune", *words, "--budget", "5m"])
    assert printable(["mla-tune", f"--storage={url}", "-h"]) == "mla-tune --storage=URL -h"


@pytest.mark.parametrize(
    "url", ["postgresql://u@h:5432/d", "postgresql://h/d", "sqlite:////a/b.db"]
)
def test_a_plain_url_is_shown(url: str) -> None:
    assert printable(["mla-tune", "--storage", url]) == f"mla-tune --storage {url}"
    assert printable(["mla-tune", f"--storage={url}"]) == f"mla-tune --storage={url}"


@pytest.mark.parametrize("url", ["", "nonsense", f"postgresql://u:{SECRET}@h:x/d", "http://h"])
def test_what_is_no_storage_is_one_line(fake: FakeRunners, url: str) -> None:
    text = error("--storage", url, *TUNE)
    assert text.startswith("expected --storage postgresql://")
    assert SECRET not in text


def test_an_interrupt_says_how_to_continue_without_the_password(
    fake: FakeRunners, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet_study, "_open", stop)
    text = error("--storage", f"postgresql://u:{SECRET}@h/d", *TUNE)
    assert text.startswith("interrupted; finished buckets are stored. To continue: ")
    assert "--storage URL --budget" in text


def test_a_storage_before_a_command_is_refused(fake: FakeRunners, url: str) -> None:
    assert "--storage stands before 'probe'" in error("--storage", url, "probe", code=2)
