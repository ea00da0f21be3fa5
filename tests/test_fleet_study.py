"""The database of a fleet: who may use it, and what is said of one that can't be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import sqlalchemy

from mla_tuner import fleet_study
from mla_tuner.errors import FleetError
from mla_tuner.fleet_study import FleetStudy
from mla_tuner.shapes import Bucket
from mla_tuner.store import Store

BUCKET = Bucket(1024, 1, 16, "bfloat16", 512, 64, 1, "paged")
LIKE = ("cpu/x86_64-avx2/4c/24gb", "kernel digest", "MLX 0.32.4", "Test OS 1")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fleet.db"


@pytest.fixture
def study(url: str) -> Iterator[FleetStudy]:
    with FleetStudy(url, LIKE) as study:
        yield study


@pytest.mark.parametrize("part", range(4))
def test_another_kind_of_machine_is_refused(url: str, study: FleetStudy, part: int) -> None:
    other = [*LIKE]
    other[part] = "another one"
    with pytest.raises(FleetError) as refused, FleetStudy(url, other):
        pass
    text = str(refused.value)
    assert f"it has another one, the fleet {LIKE[part]}; another database" in text
    assert [each.study_name for each in study.storage.get_all_studies()] == [
        " | ".join(("mla-tuner", *LIKE))
    ]


def test_studies_of_others_do_no_harm(url: str) -> None:
    optuna.create_study(storage=url, study_name="mine")
    with FleetStudy(url, LIKE) as study:
        assert study.attempts() == []


@pytest.mark.parametrize("ours", [True, False])
def test_the_file_of_something_else_is_left_alone(tmp_path: Path, ours: bool) -> None:
    path = tmp_path / "t.db"
    if ours:
        with Store(path):
            pass
    else:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("CREATE TABLE bookmark (url TEXT)")
    before = path.read_bytes()
    with pytest.raises(FleetError, match=r"t\.db: it is the database of another program$"):
        FleetStudy(f"sqlite:///{path}", LIKE)
    assert path.read_bytes() == before


SECRET = "s3cr3t"
NO_URLS = (
    *("", "nonsense", SECRET, f"postgresql://u:{SECRET}@h:port/d", "postgresql://"[:-1]),
    *(f"mysql://u:{SECRET}@h/d", f"oracle:{SECRET}", f"redis://:{SECRET}@h", f"http://{SECRET}"),
    *(f"postgresql://u:a@{SECRET}@h/d", f"postgresql://u/{SECRET}@h/d", "sqlite://", "sqlite:///"),
    f"\n{SECRET}\0",
)


@pytest.mark.parametrize("text", NO_URLS)
def test_what_is_no_url_is_one_line_without_the_password(text: str) -> None:
    with pytest.raises(FleetError) as error:
        FleetStudy(text, LIKE)
    assert str(error.value).startswith(
        "expected --storage postgresql://[user@]host[:port]/database"
    )
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{SECRET}@127.0.0.1:1/d",
        f"postgresql://u@127.0.0.1:1/d?password={SECRET}",
        f"postgres+psycopg2://u:{SECRET}{{x}}@127.0.0.1:1/d",
        "sqlite:////nonexistent/folder/x.db",
    ],
)
def test_a_storage_out_of_reach_is_one_line(text: str) -> None:
    if text.startswith("postgres"):
        pytest.importorskip("psycopg", reason="psycopg is not installed: mla-tuner[fleet]")
    with pytest.raises(FleetError, match=r"^cannot use the storage .*") as error:
        FleetStudy(text, LIKE)
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_driver_the_extra_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ImportError("No module named 'psycopg'")

    monkeypatch.setattr(fleet_study, "RDBStorage", missing)
    with pytest.raises(FleetError, match=r"pip install 'mla-tuner\[fleet\]'"):
        FleetStudy(url, LIKE)


def test_another_optunas_tables_are_one_line(url: str, study: FleetStudy) -> None:
    with study.storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = 'v9'"))
    with pytest.raises(FleetError, match="optuna version"):
        FleetStudy(url, LIKE)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE trial_user_attributes SET value_json = '{junk'",
        "UPDATE trial_user_attributes SET value_json = ''",
        "UPDATE trial_user_attributes SET value_json = NULL",
        "UPDATE trials SET state = 'LOST'",
        "UPDATE trials SET datetime_start = 'yesterday'",
        "UPDATE trial_values SET value_type = 'HUGE'",
        "UPDATE studies SET study_id = 9",
    ],
)
def test_malformed_rows_are_one_line(study: FleetStudy, change: str) -> None:
    attempt = study.claim(BUCKET)
    assert attempt is not None
    study.finish(attempt, 2.0, {})
    with study.storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text(change))
    with pytest.raises(FleetError, match=r"^cannot use the storage .*: malformed data \(") as error:
        study.attempts()
    assert "\n" not in str(error.value)
