"""Misses of serving: counted, written by every process by itself, and tuned on request."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from commands import answer, error, run
from fakes import FakeRunners

from mla_tuner import policy as policies
from mla_tuner.errors import StoreError
from mla_tuner.integrations import counts
from mla_tuner.integrations.counts import Stats, read_misses
from mla_tuner.plan import MLX, Decision, Plan, Source
from mla_tuner.shapes import DEEPSEEK, Bucket, Geometry, bucket_of

GATES = Decision(MLX, "gates", "not tuned here")
ASKED = (4096, 1, 16, "bfloat16", 1, DEEPSEEK, "dense")
BUCKET = bucket_of(4096, 1, 16, "bfloat16", layout="dense")


def missed(*contexts: int, layout: str = "dense") -> Stats:
    stats = Stats()
    for context in contexts:
        stats.count_look_up(GATES, context, *ASKED[1:-1], layout)
    return stats


# --- counting ------------------------------------------------------------------------------------


def test_a_miss_is_what_was_not_measured_on_such_a_device() -> None:
    stats = Stats()
    for source in get_args(Source):
        stats.count_look_up(Decision(Plan("split", 2), source, ""), *ASKED)
    assert stats.look_ups == 6
    assert stats.misses == {BUCKET: 2}  # of the family and of the gates
    assert "misses of the table: 2, in buckets: 1" in str(stats)
    assert "misses" not in str(Stats())


def test_misses_count_by_bucket() -> None:
    stats = missed(4000, 4096, 4097, 9000)
    assert stats.misses == {BUCKET: 3, BUCKET._replace(context=8192): 1}


@pytest.mark.parametrize("context", [1, 700, 1 << 21])
def test_a_context_that_has_no_bucket_is_no_miss(context: int) -> None:
    stats = missed(context)
    assert (stats.look_ups, stats.misses, stats.other_misses) == (1, {}, 0)


def test_the_number_of_buckets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MAX_MISSES", 2)
    stats = missed(1024, 2048, 4096, 8192, 2048)
    assert sum(stats.misses.values()) == 3
    assert len(stats.misses) == 2
    assert stats.other_misses == 2
    assert "misses of the table: 5, in buckets: 2" in str(stats)


def test_a_copy_counts_by_itself() -> None:
    stats = missed(4096)
    copy = stats.copy()
    stats.count_look_up(GATES, *ASKED)
    assert (copy.misses[BUCKET], stats.misses[BUCKET]) == (1, 2)
    assert stats.copy() == stats


def test_the_log_names_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mla_tuner"):
        Stats(engine="vllm-metal").count_stock("prefill")
    assert caplog.messages == ["vllm-metal's own attention runs: prefill"]


# --- files ---------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    stats = missed(9000, 4096, 4096)
    stats.count_look_up(GATES, 2048, 8, 40, "float16", 4, Geometry(256, 32), "paged")
    path = stats.write_misses(tmp_path / "new" / "m.json")
    assert path == tmp_path / "new" / "m.json"
    first, *others = read_misses(path)
    assert first == BUCKET
    assert set(others) == set(stats.misses) - {BUCKET}
    assert list((tmp_path / "new").iterdir()) == [path]


def test_each_process_has_a_file_beside_the_database(tmp_path: Path) -> None:
    """Many at once, and twice each: nobody's counts are lost or counted twice."""
    code = (
        "from mla_tuner.integrations.counts import Stats\n"
        "from mla_tuner.plan import MLX, Decision\n"
        "stats, decision = Stats(), Decision(MLX, 'gates', '')\n"
        "for context in (4096, 8192, 4096):\n"
        "    stats.count_look_up(decision, context, 1, 16, 'bfloat16', 1, (512, 64), 'dense')\n"
        "    assert stats.copy().write_misses()\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    files = sorted(tmp_path.glob("misses-*.json"))
    assert len(files) == 3
    total: dict[Bucket, int] = {}
    for file in files:
        for row in json.loads(file.read_text())["misses"]:
            key = Bucket(*(row[name] for name in Bucket._fields))
            total[key] = total.get(key, 0) + row["count"]
    assert total == {BUCKET: 6, BUCKET._replace(context=8192): 3}
    assert read_misses(tmp_path) == [BUCKET, BUCKET._replace(context=8192)]


def test_serving_goes_on_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    stats = missed(4096)
    os.mkfifo(tmp_path / "pipe")
    places: list[Any] = [tmp_path / "file" / "m.json", tmp_path, "~nobody-here/m.json"]
    places += [tmp_path / "pipe", tmp_path / ("x" * 300)]
    assert [stats.write_misses(place) for place in places] == [None] * 5
    assert (tmp_path / "pipe").is_fifo()
    monkeypatch.setenv("MLA_TUNER_DB", "~nobody-here/t.db")
    assert stats.write_misses() is None
    assert len(caplog.messages) == 6
    assert all(text.startswith("the misses were not written: ") for text in caplog.messages)


ROW = {"count": 1, **BUCKET._asdict()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "another"}',
        json.dumps({"format": counts.FORMAT}),
        json.dumps({"format": counts.FORMAT, "misses": 3}),
        json.dumps({"format": counts.FORMAT, "misses": [[1]]}),
        *(
            json.dumps({"format": counts.FORMAT, "misses": [{**ROW, **change}]})
            for change in (
                {"count": 0},
                {"count": True},
                {"count": "3"},
                {"context": 4000},
                {"context": 0},
                {"heads": 129},
                {"heads": [16]},
                {"heads": 16.0},
                {"heads": True},
                {"kv_lora_rank": 512.0},
                {"rope_dim": 64.0},
                {"context": 10**400},
                {"context": float("nan")},
                {"dtype": "int8"},
                {"kv_lora_rank": 100},
                {"layout": "ring"},
                {"q_len": 3},
            )
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "misses-here-1.json"
    path.write_text(text)
    with pytest.raises(StoreError, match="holds no misses of a server"):
        read_misses(path)
    with pytest.raises(StoreError, match="holds no misses of a server"):
        read_misses(tmp_path)


def test_the_error_stays_a_short_line(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for change in ({"layout": "x" * 100_000}, {"count": 0, "more": ["y\n"] * 100_000}):
        path.write_text(json.dumps({"format": counts.FORMAT, "misses": [{**ROW, **change}]}))
        with pytest.raises(StoreError) as raised:
            read_misses(path)
        assert len(str(raised.value)) < 300 + len(str(path))
        assert "\n" not in str(raised.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "misses-pipe.json")
    for path in (tmp_path / "misses-pipe.json", tmp_path, Path("/dev/zero")):
        with pytest.raises(StoreError, match="it is no file"):
            read_misses(path)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    for name in ("x" * 300, "loop", "file/m.json", "../" * 2000):
        with pytest.raises(StoreError, match="cannot read"):
            read_misses(tmp_path / name)


def test_threads_of_a_server_may_write_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = missed(*(1024 << at for at in range(10)))
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(stats.copy().write_misses, tmp_path / "m.json") for _ in range(200)]
        assert {future.result() for future in futures} == {tmp_path / "m.json"}
    assert caplog.messages == []
    assert set(read_misses(tmp_path / "m.json")) == set(stats.misses)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.json"]


def test_a_write_that_is_cut_short_leaves_what_was_there(tmp_path: Path) -> None:
    path = missed(4096).write_misses(tmp_path / "misses-here-1.json")
    assert path
    code = (
        "import os, pathlib, sys\n"
        "from mla_tuner.integrations.counts import Stats\n"
        "def killed(self, data):\n"
        "    with self.open('wb') as file:\n"
        "        file.write(data[:20])\n"
        "    os._exit(9)\n"
        "pathlib.Path.write_bytes = killed\n"
        "Stats().write_misses(sys.argv[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2  # the half-written one is beside it
    assert read_misses(path) == read_misses(tmp_path) == [BUCKET]


def test_too_large_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = missed(4096).write_misses(tmp_path / "m.json")
    assert path
    monkeypatch.setattr(counts, "MAX_BYTES", 10)
    with pytest.raises(StoreError, match="more than 0 MB"):
        read_misses(path)


# --- tuning --------------------------------------------------------------------------------------


def test_missed_buckets_are_tuned_most_frequent_first(fake: FakeRunners, tmp_path: Path) -> None:
    stats = missed(1024, 4096, 4096, 4096, 2048, 2048)
    stats.write_misses()
    found = answer("--from-misses", "--budget", "1h")
    assert {row["context"] for row in found["plans"]} == {1024, 2048, 4096}
    assert {row["layout"] for row in found["plans"]} == {"dense"}
    assert [shape.context for shape in fake.duels] == [4096, 2048, 1024]
    again = answer("--from-misses", "--budget", "1h")
    assert (again["tuned"], again["already_tuned"]) == (0, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "paged"},
        {"layout": "dense"},
        {"dtype": "float16"},
        {"q_len": 4},
        {"kv_lora_rank": 256, "rope_dim": 32},
        {"heads": 40, "batch": 8},
    ],
    ids=str,
)
def test_the_hint_asks_for_what_was_tuned(
    fake: FakeRunners, tmp_path: Path, change: dict[str, Any]
) -> None:
    stats = Stats(misses=Counter([BUCKET._replace(**change)]))
    stats.write_misses(tmp_path / "m.json")
    done = run("--from-misses", str(tmp_path / "m.json"), "--budget", "1h", "--device", "cpu")
    (hint,) = re.findall("^What it runs:  mla-tune (.*)$", done.stdout, re.MULTILINE)
    assert answer(*hint.split())["source"] == "tuned"


def test_what_was_tuned_is_a_miss_no_more(fake: FakeRunners, tmp_path: Path) -> None:
    path = missed(4096).write_misses(tmp_path / "elsewhere.json")
    run("--from-misses", str(path), "--budget", "1h", "--device", "cpu")
    policy = policies.Policy.load()
    stats = Stats()
    stats.count_look_up(policy.decide(*ASKED), *ASKED)
    assert (stats.look_ups, stats.misses) == (1, {})


def test_a_folder_is_that_folder(
    fake: FakeRunners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` is not the folder of the database, though Path() is equal to it."""
    missed(4096).write_misses(tmp_path / "here" / "misses-other-1.json")
    missed(8192).write_misses()
    monkeypatch.chdir(tmp_path / "here")
    for folder, context in ((".", 4096), (str(tmp_path / "here"), 4096), (str(tmp_path), 8192)):
        found = answer("--from-misses", folder, "--budget", "1h")
        assert {row["context"] for row in found["plans"]} == {context}
    found = answer("--from-misses", "--budget", "1h")
    assert {row["context"] for row in found["plans"]} == {8192}


def test_without_misses_the_error_says_what_writes_them(fake: FakeRunners, tmp_path: Path) -> None:
    assert "stats().write_misses()" in error("--from-misses")
    assert "no misses at" in error("--from-misses", str(tmp_path / "no.json"))
    assert "no misses at" in error("--from-misses", "--db", str(tmp_path / "no" / "t.db"))
    assert Stats().write_misses() is not None  # it says that there is none
    assert "no misses in" in error("--from-misses")


@pytest.mark.parametrize("option", ["--contexts=4k", "--heads=16", "--model=DeepSeek-V3"])
def test_misses_say_all_that_lists_would(fake: FakeRunners, option: str) -> None:
    done = run("--from-misses=x.json", option, code=2)
    assert "--from-misses says it all: leave out --" in " ".join(done.stderr.split())
