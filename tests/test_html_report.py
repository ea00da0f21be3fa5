"""Findings of a device: what is read, what is compared, and that no foreign text becomes markup."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commands import answer, error, run
from html_reports import (
    BEST,
    COSTS,
    EVIL,
    H200,
    KERNEL,
    PLACES,
    SOFTWARE,
    WINNER,
    duelled,
    failures,
    fill,
    poison,
    searched,
    timed,
)

from mla_tuner import share
from mla_tuner.device import Device
from mla_tuner.errors import StoreError
from mla_tuner.evidence import Measurement
from mla_tuner.html import compared, findings, markdown, page, tables
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store

OTHER = Device("cuda", "sm_90", "nvidia-sm90", 78, 96, "NVIDIA H20", 60 << 20)
SHAPE = Shape(32768, 1, 16)


def found(path: Path, key: str | None = None) -> findings.Findings:
    with Store(path, create=False) as store:
        return findings.of_store(store, key)


def finding(search: list[Measurement], duel: list[Measurement]) -> findings.Finding:
    pairs = [("search", m) for m in search] + [("duel", m) for m in duel]
    return findings.Finding(SHAPE.bucket, None, "", tuple(pairs))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return fill(tmp_path / "t.db")


# --- what is read --------------------------------------------------------------------------------


def test_every_shape_has_its_winner_and_the_reason(database: Path) -> None:
    read = found(database)
    assert (read.device, read.source, len(read.findings)) == (H200, "database", 24)
    first, *others = read.findings
    assert [each.row.plan for each in others if each.row] == [WINNER] * 23
    assert first.row is not None
    assert first.row.plan == MLX
    assert "not beyond 1.02x for sure" in first.reason
    assert others[0].reason == "split x8 r16 is 9.8x mlx [9.71, 9.9]"
    assert read.measurements == 24 * (len(COSTS) + 2) + 3
    assert [run["clock"] for run in read.runs] == ["gpu"]


def test_the_versions_that_were_timed_last_are_shown(database: Path) -> None:
    fill(database, contexts=[2048], heads=[16], batches=[1], dtypes=["bfloat16"], mlx="0.33.0")
    read = found(database)
    assert read.versions["mlx"] == "0.33.0"
    assert [each.bucket.context for each in read.findings] == [2048]
    assert read.left_out == 24
    assert "Left out: 24 winners of other versions." in page.render(read)


def test_a_run_that_timed_nothing_hides_none(database: Path) -> None:
    with Store(database) as store:
        store.start_run(H200, kernel="new", software={"mlx": "0.33.0"})
    assert found(database).versions["mlx"] == "0.32.4"


def test_of_several_devices_one_is_named(database: Path) -> None:
    fill(database, device=OTHER, contexts=[1024])
    with pytest.raises(
        StoreError, match=r"has 2 devices, and MLX's here, .*, is none of them: name one with"
    ):
        found(database)
    names = f"{H200.key}, {OTHER.key}"
    assert error("report", "--db", str(database)).endswith(f"name one with --device: {names}")
    assert found(database, OTHER.key).device == OTHER
    with pytest.raises(StoreError, match=r"has no cuda/sm_91: name one"):
        found(database, "cuda/sm_91")


@pytest.mark.parametrize("here", [H200, OTHER])
def test_of_several_devices_that_of_this_machine_is_shown(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Device
) -> None:
    """What a colleague's table brought does not ask who this is."""
    fill(database, device=OTHER, contexts=[1024])
    monkeypatch.setattr(findings, "probe", lambda: here)
    with Store(database) as store:  # nothing was measured on it: there is nothing to choose
        third = replace(OTHER, cores=1)
        store.start_run(third, kernel=KERNEL, software=SOFTWARE)
    (other,) = {H200.key, OTHER.key} - {here.key}
    assert (found(database).device, found(database).others) == (here, [other])
    said = run("report", "--db", str(database)).stderr
    assert said == f"this machine's: {here.key}; with --device: {other}\n"
    assert run("report", "--db", str(database), "--device", here.key).stderr == ""
    with Store(database) as store:
        (table,) = share.export(store, tmp_path / "out")
    assert findings.of_table(table).device == here
    assert findings.of_table(table, other).others == [here.key]


def test_a_plan_that_did_not_hold_is_told(tmp_path: Path) -> None:
    path = fill(tmp_path / "t.db", [32768], [1], [16], ["bfloat16"])
    with Store(path) as store:
        run = store.start_run(H200, kernel=KERNEL, software=SOFTWARE)
        slow = [timed(SHAPE, MLX, 19), Measurement(SHAPE, WINNER, "wrong", "wrong by 0.2")]
        store.record(run, SHAPE.bucket, [], slow, refutes=True)
    (each,) = found(path).findings
    assert each.row is not None
    assert (each.row.plan, each.reason) == (MLX, "split x8 r16 did not hold: wrong by 0.2")


def test_a_plan_that_got_slower_is_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "t.db", [32768], [1], [16], ["bfloat16"])
    with Store(path) as store:
        run = store.start_run(H200, kernel=KERNEL, software=SOFTWARE)
        store.record(run, SHAPE.bucket, [], duelled(SHAPE, WINNER, 1.25), refutes=True)
    refused = compared.refused(found(path).findings)[-1]
    assert (refused.status, refused.plans) == ("not faster", [str(WINNER)])
    assert refused.message == "split x8 r16 did not hold: 0.8x mlx"


def test_the_reason_is_that_of_the_stored_plan(tmp_path: Path) -> None:
    """Runs of other machines are pooled: the last verdict need not be the one that counts."""
    path = fill(tmp_path / "t.db", [1024, 32768], [1], [16], ["bfloat16"])
    with Store(path) as store:
        run = store.start_run(H200, kernel=KERNEL, software=SOFTWARE)
        store.record(run, SHAPE.bucket, [], duelled(SHAPE, WINNER, 0.99))
        store._db.execute(
            "UPDATE plan SET path = 'split', partitions = 8, tile = 'r16' WHERE context = 32768"
        )
        store._db.commit()
    assert found(path).findings[1].reason == "split x8 r16 is 9.8x mlx [9.71, 9.9]"


def test_evidence_without_a_verdict_is_shown(tmp_path: Path) -> None:
    with Store(tmp_path / "t.db") as store:
        run = store.start_run(H200, kernel="digest", software={"mlx": "0.32.4"})
        store.record(run, SHAPE.bucket, searched(SHAPE))
    (each,) = (read := found(tmp_path / "t.db")).findings
    assert (each.row, each.reason) == (None, "")
    assert "undecided" in markdown.render(read)
    assert "the evidence decides nothing yet" in page.render(read)


def test_an_empty_database_is_one_line(tmp_path: Path) -> None:
    Store(tmp_path / "t.db").close()
    with pytest.raises(StoreError, match="holds no measurement: run mla-tune"):
        found(tmp_path / "t.db")
    with Store(tmp_path / "t.db") as store:
        store.start_run(H200, kernel="digest", software={"mlx": "0.32.4"})
    with pytest.raises(StoreError, match="holds no measurement of cuda/sm_90/132c/140gb"):
        found(tmp_path / "t.db")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE device SET name = x'00'",
        "UPDATE device SET cache_bytes = 'much'",
        "UPDATE run SET software = '[]'",
        "UPDATE run SET options = '{'",
        "UPDATE run SET conditions = x'00'",
        """UPDATE run SET conditions = '{"clock": ["gpu"]}'""",
        "UPDATE measurement SET median_us = 'fast'",
        "UPDATE measurement SET path = 'teleport'",
        "UPDATE plan SET tile = x'00'",
    ],
)
def test_malformed_rows_are_one_line(database: Path, change: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(change)
    with pytest.raises(StoreError, match="malformed data") as raised:
        found(database)
    assert "\n" not in str(raised.value)


# --- what is compared ----------------------------------------------------------------------------


def test_regret_is_over_the_best_of_the_most_rounds() -> None:
    lucky = timed(SHAPE, Plan("split", 32, "r16"), 2, 0.05)
    each = finding([*searched(SHAPE), lucky], duelled(SHAPE))
    best = compared.best(each)
    assert best is not None
    assert best.plan == str(BEST)
    assert compared.behind(lucky.median_us, best) == pytest.approx(-0.5)


def test_regrets_of_choices(database: Path) -> None:
    stored, *others = compared.regrets(found(database).findings[1:])
    assert (stored.name, stored.buckets) == ("the stored plans", 23)
    assert stored.mean == stored.worst == pytest.approx(0.02)
    worst = {each.name: each.worst for each in others}
    assert worst == pytest.approx(
        {"always mlx": 9, "always mlx_rows": 7, "always single": 4, "always split": 0}
    )


def test_a_duel_alone_has_no_regret() -> None:
    each = finding([], duelled(SHAPE))
    assert compared.best(each) is None
    assert compared.regrets([each]) == []


def test_the_points_of_a_curve_are_the_best_plans_of_most_rounds() -> None:
    again = timed(SHAPE, WINNER, 2, 0.01)  # fewer rounds than the search's nine
    points = {p.path: p for p in compared.points(finding(searched(SHAPE), [again]))}
    assert list(points) == ["mlx", "mlx_rows", "single", "split"]
    assert points["split"].plan == str(BEST)
    assert points["split"].p10_us == pytest.approx(512 * 0.1 * 0.97)


def test_a_measurement_without_a_time_is_no_point() -> None:
    known = Measurement(SHAPE, Plan("single", 1, "r16"), ratio=2.0)  # as imported runs have it
    assert compared.points(finding([known], [])) == []
    assert compared.best(finding([known], [])) is None


def test_refusals_are_grouped_by_their_reason(database: Path) -> None:
    refused = compared.refused(found(database).findings)
    assert {each.status for each in refused} == {"wrong", "error", "timeout", "not faster"}
    assert refused[-1].status == "not faster"
    assert refused[-1].plans == [str(WINNER)]
    many = [finding(failures(SHAPE), []), finding(failures(SHAPE), [])]
    assert [len(each.plans) for each in compared.refused(many)] == [2, 2, 2]


def test_long_lists_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    monkeypatch.setattr(tables, "MOST_GROUPS", 1)
    table = tables.refusals(found(database))
    assert (len(table.rows), table.note) == (1, "And 3 other reasons.")


# --- a shared table ------------------------------------------------------------------------------


def test_a_table_shows_the_same_winners(database: Path, tmp_path: Path) -> None:
    with Store(database) as store:
        (path,) = share.export(store, tmp_path / "out")
    told, known = findings.of_table(path), found(database)
    assert told.device == known.device
    assert told.versions == known.versions
    for a, b in zip(told.findings, known.findings, strict=True):
        assert a.row is not None
        assert b.row is not None
        assert (a.bucket, a.row.plan) == (b.bucket, b.row.plan)
        assert a.row.speedup == pytest.approx(b.row.speedup, rel=1e-3)
    points = {point.path: point for point in compared.points(told.findings[-1])}
    assert points["split"].p90_us is not None  # from the rounds of the duel
    assert points["single"].median_us == pytest.approx(points["mlx"].median_us / 2, rel=1e-3)
    assert points["single"].p90_us is None
    assert "Not known" in page.render(told)


def test_a_table_that_lies_is_refused(database: Path, tmp_path: Path) -> None:
    with Store(database) as store:
        (path,) = share.export(store, tmp_path / "out")
    path.write_text(path.read_text().replace('"split"', '"magic"'))
    assert "nvidia-sm90.json" in error("report", "--table", str(path))


# --- foreign text --------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.handlers += [name for name, value in attrs if "javascript:" in (value or "")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.texts.append(data)


def test_foreign_text_never_becomes_markup(database: Path) -> None:
    clean = Elements(page.render(found(database)))
    poison(database)
    read = found(database)
    text = page.render(read)
    poisoned = Elements(text)
    assert EVIL in read.device.name
    assert set(poisoned.tags) == set(clean.tags)
    assert poisoned.tags.count("script") == 2
    assert poisoned.handlers == []
    measured = json.loads(poisoned.texts[0])["buckets"][-1]["measured"]
    assert measured[0][3] == EVIL
    told = markdown.render(read)
    assert "<" not in told
    assert not re.search(r"(?<!\\)[\[\]`*]", told.replace("**", ""))
    assert EVIL not in text


def test_every_text_column_is_poisoned(database: Path) -> None:
    """A column that is added later is thought of."""
    checked = {"key", "device", "backend", "architecture"}  # one text decides where a row belongs
    checked |= {"path", "dtype", "layout", "status", "stage", "samples_us", "baseline"}  # refused
    with closing(sqlite3.connect(database)) as connection:
        for name in ("device", "run", "plan", "threshold", "measurement"):
            columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
            texts = {column[1] for column in columns if column[2] == "TEXT"} - checked - {"at"}
            named = {text for text in texts if f"UPDATE {name} SET {text} " in " ".join(PLACES)}
            assert named == texts, name


def test_a_message_is_cut(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "UPDATE measurement SET message = ? WHERE status = 'error'", ["x" * 9999]
        )
    read = found(database)
    assert "x" * (tables.MOST_TEXT + 1) not in page.render(read) + markdown.render(read)


# --- the two texts -------------------------------------------------------------------------------


def test_a_page_needs_nothing_else(database: Path) -> None:
    text = page.render(found(database))
    assert re.findall(r"https?://[^\s\"'<]+", text) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'" in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|innerHTML|eval|import)\b", text)


def test_a_page_of_5000_measurements_is_small(tmp_path: Path) -> None:
    read = found(fill(tmp_path / "t.db", [1024, 2048, 4096, 8192], [1, 2, 4], [16, 128]))
    assert read.measurements > 300
    assert len(page.render(read)) * 5000 / read.measurements < 3e6


def test_rows_of_markdown_have_as_many_cells_as_their_heads(database: Path) -> None:
    poison(database)
    blocks = re.findall(r"(?:^\|.*\n)+", markdown.render(found(database)), re.MULTILINE)
    assert len(blocks) > 10
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


# --- the command ---------------------------------------------------------------------------------


def test_both_files_are_written(database: Path, tmp_path: Path) -> None:
    html, md = tmp_path / "new" / "r.html", tmp_path / "r.md"
    result = run("report", "--db", str(database), "--html", str(html), "--md", str(md))
    assert result.stdout.splitlines() == [str(html), str(md)]
    assert html.read_text().startswith("<!doctype html>")
    assert md.read_text().startswith("# NVIDIA H200: MLA decode plans")


@pytest.mark.parametrize("option", ["--html", "--md"])
@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_a_report_never_replaces_what_it_is_of(
    database: Path, tmp_path: Path, option: str, link: str | None
) -> None:
    out = tmp_path / "out"
    if link is None:
        out = tmp_path / "." / "x" / ".." / database.name
    else:
        getattr(out, link)(database)
    before = database.read_bytes()
    assert "would replace" in error("report", "--db", str(database), option, str(out))
    assert "would replace" in error("report", "--table", str(database), option, str(out))
    assert database.read_bytes() == before


def test_a_page_and_its_markdown_are_two_files(database: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "r")
    assert "would replace" in error("report", "--db", str(database), "--html", out, "--md", out)
    assert not Path(out).exists()


def test_an_error_is_one_line_whatever_the_device_is_called(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE device SET architecture = 'sm' || char(10, 27) || '[31m'")
    said = error("report", "--db", str(database), "--device", "none")
    assert "cuda/sm  [31m/132c/140gb" in said
    assert said.isprintable()


def test_without_files_the_markdown_is_printed(database: Path) -> None:
    text = run("report", "--db", str(database)).stdout
    assert text.rstrip("\n") == markdown.render(found(database)).rstrip("\n")


def test_the_answer_as_json(database: Path) -> None:
    told: Any = answer("report", "--db", str(database), "--device", H200.key)
    assert (told["device"], told["name"], told["mlx"]) == (H200.key, "NVIDIA H200", "0.32.4")
    assert (told["shapes"], told["files"]) == (24, [])
    assert told["regret"][0]["name"] == "the stored plans"


def test_what_the_command_refuses(database: Path, tmp_path: Path) -> None:
    of = ("report", "--db", str(database))
    assert "has no gpu: name one" in error(*of, "--device", "gpu")
    assert "leave out --db" in error(*of, "--table", "t.json", code=2)
    assert "cannot write" in error(*of, "--html", str(database / "r.html"))
    assert "no database at" in error("report", "--db", str(tmp_path / "none.db"))
    assert "put it behind" in error("--device", "cpu", "report", "--db", str(database), code=2)
