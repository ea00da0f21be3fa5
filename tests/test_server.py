"""A team's server: what it keeps, who may add to it, and what its pages and tables show."""

from __future__ import annotations

import html
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from server_tables import CPU, KERNEL, PUSH, SPLIT, Server, links, repeated, table

from mla_tuner import share
from mla_tuner.device import Device
from mla_tuner.errors import ShareError
from mla_tuner.plan import Plan
from mla_tuner.server import archive
from mla_tuner.server.charts import Point, curves, forest
from mla_tuner.server.reading import Reading

pytest.importorskip("datasette", reason="datasette is not installed")

H200 = Device("cuda", "sm_90", "nvidia-sm90", 132, 140, "NVIDIA H200", 60 << 20)
FAMILY = f"/-/tuning/tables/{CPU.family}.json"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "shared.db")
    yield made
    made.datasette.close()


# --- what is kept --------------------------------------------------------------------------------


def test_a_table_comes_back_as_it_was_pushed(server: Server, tmp_path: Path) -> None:
    pushed = table(tmp_path)
    assert server.push(pushed, pushed) == [
        {"ok": True, "new": 2, "known": 0},
        {"ok": True, "new": 0, "known": 2},
    ]
    assert server.get(f"{FAMILY}?kernel={KERNEL}").text == share.render(pushed)


def test_runs_of_several_machines_are_pooled_in_any_order(server: Server, tmp_path: Path) -> None:
    a, b = table(tmp_path), table(tmp_path, 8192, 32768, speedup=2.0)
    server.push(b)
    assert server.get(FAMILY).text == share.render(b)  # read on from here
    server.push(a)
    assert server.get(FAMILY).text == share.render(share.merged(a, b))
    other = Server(tmp_path / "other.db")
    other.push(a, b)
    assert other.get(FAMILY).text == server.get(FAMILY).text
    other.datasette.close()


def test_another_server_of_the_file_sees_the_same(server: Server, tmp_path: Path) -> None:
    server.push(table(tmp_path))
    other = Server(server.path, None)
    assert other.get(FAMILY).text == server.get(FAMILY).text
    server.push(repeated(table(tmp_path), 1))
    assert len(json.loads(other.get(FAMILY).text)["devices"][0]["runs"]) == 2
    other.datasette.close()


def test_kernels_and_families_are_kept_apart(server: Server, tmp_path: Path) -> None:
    ours, theirs = table(tmp_path), table(tmp_path, kernel="f" * 16)
    gpu = table(tmp_path, 1024, device=H200, plan=Plan("mlx"))
    server.push(ours, theirs, gpu)
    assert server.get(f"{FAMILY}?kernel={KERNEL}").text == share.render(ours)
    assert server.get(f"{FAMILY}?kernel={'f' * 16}").text == share.render(theirs)
    assert server.get(FAMILY).text == share.render(share.merged(ours, theirs))
    assert server.get(f"/-/tuning/tables/{H200.family}.json").text == share.render(gpu)
    other = server.get(f"{FAMILY}?kernel={'0' * 16}")
    assert (other.status_code, other.json()["error"]) == (
        404,
        f"{CPU.family} was measured with the kernels {KERNEL}, {'f' * 16} only",
    )
    none = server.get("/-/tuning/tables/apple-m5.json")
    assert (none.status_code, none.json()["error"]) == (404, "there is nothing of apple-m5 here")


ADDED_ONLY = [
    "UPDATE evidence SET speedup = 99",
    "UPDATE run SET name = 'other'",
    "DELETE FROM evidence",
    "DELETE FROM run",
]
REPLACING = [
    "INSERT INTO evidence SELECT * FROM evidence WHERE 1 ON CONFLICT DO UPDATE SET speedup = 99",
    "INSERT OR REPLACE INTO run SELECT id, 'now', 'eve', family, device, 'other', kernel, mlx, "
    "system, day, clock, facts, '{}' FROM run",
    f"INSERT OR REPLACE INTO evidence ({', '.join(archive._EVIDENCE)}) "
    f"SELECT {', '.join(archive._EVIDENCE)} FROM evidence",
    "INSERT OR REPLACE INTO evidence SELECT id, 'another hash', received, 'eve', run, context, "
    "batch, heads, dtype, kv_lora_rank, rope_dim, q_len, layout, path, partitions, tile, baseline, "
    "failed, 99, 99, 99, rounds, day, '{}' FROM evidence",
]


@pytest.mark.parametrize("statement", [*ADDED_ONLY, *REPLACING])
def test_rows_are_only_ever_added(server: Server, tmp_path: Path, statement: str) -> None:
    server.push(table(tmp_path))

    def rows() -> list[Any]:
        with closing(sqlite3.connect(server.path)) as db:
            return [db.execute(f"SELECT * FROM {name}").fetchall() for name in ("run", "evidence")]

    before = rows()
    write = server.datasette.get_database("shared").execute_write
    if statement in REPLACING:
        server(lambda _: write(statement))
    else:
        with pytest.raises(sqlite3.DatabaseError, match="evidence is only ever added"):
            server(lambda _: write(statement))
    assert rows() == before


def test_texts_are_kept_of_what_is_there_alone(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    archive.prepare(path, create=True)
    reading = Reading()
    with closing(sqlite3.connect(path)) as db:
        archive.add(db, table(tmp_path), "alice")
        reading.refresh(db)
        first = reading.text(CPU.family, KERNEL)
        assert reading.text(CPU.family, KERNEL) is first
        assert [reading.text(CPU.family, str(each)) for each in range(9)] == [None] * 9
        assert len(reading._texts) == 1
        archive.add(db, repeated(table(tmp_path), 1), "bob")
        reading.refresh(db)
        assert reading.text(CPU.family, KERNEL) != first


# --- who may add ---------------------------------------------------------------------------------


def test_a_push_takes_a_token_that_allows_it(server: Server, tmp_path: Path) -> None:
    from datasette.tokens import TokenRestrictions

    text = share.render(table(tmp_path))
    reads = server.token(restrictions=TokenRestrictions().allow_all("view-instance"))
    forged = server.token()[:-4] + "AAAA"
    statuses = [server.post(PUSH, text, each).status_code for each in (None, reads, "x", forged)]
    assert statuses == [403, 403, 403, 401]
    assert server.get("/-/tuning.json").json()["devices"] == []
    only = server.token(restrictions=TokenRestrictions().allow_all("push-tables"))
    assert server.post(PUSH, text, only).status_code == 200
    assert server.get("/shared/evidence.json").json()["rows"][0]["contributor"] == "alice"


def test_a_token_allows_nothing_but_to_push(server: Server, tmp_path: Path) -> None:
    server.push(table(tmp_path))
    token = server.token()
    for path, body in (
        ("/shared/evidence/-/insert", {"row": {"hash": "x"}}),
        ("/shared/evidence/-/upsert", {"rows": [{"id": 1, "hash": "x"}]}),
        ("/shared/evidence/1/-/update", {"update": {"speedup": 99}}),
        ("/shared/evidence/1/-/delete", {}),
        ("/shared/evidence/-/drop", {"confirm": True}),
        ("/shared/-/create", {"table": "mine", "row": {"a": 1}}),
        ("/shared/-/execute-write", {"sql": "DELETE FROM evidence"}),
    ):
        answer = server.post(path, json.dumps(body), token)
        assert answer.status_code in (400, 403), path
        assert len(server.get("/shared/evidence.json").json()["rows"]) == 2


def test_a_server_without_a_secret_takes_nothing(server: Server, tmp_path: Path) -> None:
    server.push(table(tmp_path))
    reader, text = Server(server.path, None), share.render(repeated(table(tmp_path), 1))
    before = reader.get(FAMILY).text
    forged = server.token()[:-4] + "AAAA"
    for token, status in ((server.token(), 401), (forged, 401), ("a.proxy", 403), (None, 403)):
        answer = reader.post(PUSH, text, token)
        assert answer.status_code == status
        assert answer.json()["error"].endswith("it has to be started with --writable")
    assert reader.get(FAMILY).text == before
    assert "This server only reads" in reader.get("/-/tuning").text
    reader.datasette.close()


def test_what_is_no_table_is_refused_with_its_fault(server: Server, tmp_path: Path) -> None:
    good = share.render(table(tmp_path))
    token = server.token()
    for body, fault in (
        (b"", "the table: not JSON"),
        (b"\xff", "the table: not UTF-8 text"),
        (b"[" * 100_000, "the table: not JSON"),
        (b"{}", "the table: version: Field required"),
        (good.replace(SPLIT.tile, "../x").encode(), "the table: devices.0.buckets"),
        (good.replace('"speedup": 3.0', '"speedup": 9.0').encode(), "the table: devices.0.buckets"),
    ):
        answer = server.post(PUSH, body, token)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(fault), answer.text
    assert server.post(PUSH, " " * (33 << 20), token).status_code == 413
    assert server.get(PUSH).status_code == 405
    assert server.get("/-/tuning.json").json() == {"ok": True, "devices": []}


def test_arbitrary_sql_is_not_for_everybody(server: Server) -> None:
    assert server.get("/shared/-/query.json?sql=select+1").status_code == 403


# --- pages ---------------------------------------------------------------------------------------


def test_pages_lead_from_devices_to_evidence(server: Server, tmp_path: Path) -> None:
    server.push(table(tmp_path), table(tmp_path, 8192, speedup=2.0))
    page = server.get("/-/tuning").text
    assert "test CPU" in page
    (device,) = links(page, "device")
    page = server.get(device).text
    assert [each for each in ("b1 h16 bf16", "split x4 r16", "[3, 3]") if each not in page] == []
    assert len(pictures(page)) == 1
    buckets = links(page, "bucket")
    assert len(buckets) == 2
    page = server.get(buckets[1]).text
    (picture,) = pictures(page)
    assert len(picture.findall(".//{*}circle")) == 3  # two runs, and both together
    assert "2.5x" in page
    (run, _) = re.findall(r'href="(/shared/run/[0-9a-f]{16})"', page)
    assert "Linux 6" in server.get(run).text
    assert "<script" not in page.partition("<section")[2].partition("</section")[0]


def pictures(page: str) -> list[ElementTree.Element]:
    """The charts of a page: each is sound XML and says what it shows."""
    found = re.findall(r'<svg xmlns="[^"]*" role="img".*?</svg>', page)
    drawn = [ElementTree.fromstring(each) for each in found]
    assert all(each.find("{*}title") is not None for each in drawn)
    return drawn


def test_names_from_tables_are_text_on_a_page(server: Server, tmp_path: Path) -> None:
    from dataclasses import replace

    server.push(table(tmp_path, device=replace(CPU, name="<script>alert(1)<b>")))
    page = server.get("/-/tuning").text
    assert "<script>alert(1)" not in page
    assert html.escape("<script>alert(1)<b>") in page


def test_what_is_not_there_is_a_404(server: Server, tmp_path: Path) -> None:
    assert "There is nothing yet" in server.get("/-/tuning").text
    server.push(table(tmp_path))
    (device,) = links(server.get("/-/tuning").text, "device")
    bucket = links(server.get(device).text, "bucket")[0]
    for path in (
        "/-/tuning/device",
        device.replace(KERNEL, "0" * 16),
        bucket.replace("context=1024", "context=2048"),
        device.replace("/device", "/bucket"),
    ):
        assert server.get(path).status_code == 404, path


@pytest.mark.parametrize("query", ["fastest", "disagreements", "failures", "contributors"])
def test_canned_queries_run(server: Server, tmp_path: Path, query: str) -> None:
    server.push(table(tmp_path), table(tmp_path, 8192, speedup=2.0))
    rows = server.get(f"/shared/{query}.json?device={CPU.key}").json()["rows"]
    assert len(rows) == {"fastest": 3, "disagreements": 1, "failures": 0, "contributors": 1}[query]
    assert server.get(f"/shared/{query}").status_code == 200


def test_rows_are_to_be_had_as_json(server: Server, tmp_path: Path) -> None:
    server.push(table(tmp_path))
    (device,) = server.get("/shared/devices.json").json()["rows"]
    assert (device["device"], device["runs"], device["evidence"]) == (CPU.key, 1, 2)
    (device,) = server.get("/-/tuning.json").json()["devices"]
    assert (device["key"], device["buckets"], device["faster"]) == (CPU.key, 2, 2)
    rows = server.get("/shared/evidence.json?context=1024").json()["rows"]
    assert [(row["path"], row["speedup"]) for row in rows] == [("split", 3.0)]


# --- charts --------------------------------------------------------------------------------------


def test_charts_stay_inside_of_their_frame() -> None:
    points = [Point(1024, 0.3, 0.2, 0.4), Point(1 << 20, 700.0, 600.0, 900.0)]
    drawn = ElementTree.fromstring(curves({"a & b": points, "c": points[:1]}, "<title>"))
    _, _, wide, high = map(float, drawn.attrib["viewBox"].split())
    for each in drawn.iter():
        for name, most in (("x1", wide), ("x2", wide), ("y1", high), ("y2", high)):
            assert 0 <= float(each.get(name, 0)) <= most
    assert curves({}, "none") == forest([], "none") == ""
    assert ">1x<" in curves({"a": points}, "")  # the line that all is measured by


# --- the file ------------------------------------------------------------------------------------


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (a)")
    for create in (True, False):
        with pytest.raises(ShareError, match="is the database of another program"):
            archive.prepare(path, create=create)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ShareError, match="cannot use the shared file"):
        archive.prepare(path, create=True)
    with pytest.raises(ShareError, match="cannot use the shared file"):
        archive.prepare(tmp_path, create=True)
    with pytest.raises(ShareError, match=r"no shared file at .*: --writable makes one"):
        archive.prepare(tmp_path / "none.db", create=False)
    assert not (tmp_path / "none.db").exists()


def test_a_newer_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    archive.prepare(path, create=True)
    archive.prepare(path, create=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {archive.VERSION + 1}")
    with pytest.raises(ShareError, match="has schema 2, this mla-tuner uses 1: update it"):
        archive.prepare(path, create=True)
