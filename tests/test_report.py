"""Numbers that read well, and text that fits 80 columns."""

from __future__ import annotations

import re

import pytest
from fakes import make_device

from mla_tuner import report
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Geometry, Shape
from mla_tuner.table import Row
from mla_tuner.tuner import BucketSkipped, BucketStarted, BucketTuned, CandidateMeasured, RunStarted

SHAPE = Shape(32768, 1, 16)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Shows something and returns its lines, checked to fit 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def show(parts) -> list[str]:
        report.show(parts)
        lines = capsys.readouterr().out.splitlines()
        copied = ("To continue:", "Database:", "What it runs:")  # whole, however long
        assert all(len(line) <= 80 for line in lines if not line.startswith(copied))
        return [line.rstrip() for line in lines]

    return show


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.87, "870 ns"),
        (1.0, "1.00 us"),
        (14.24, "14.2 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (3070, "3.07 ms"),
        (12.5e6, "12.5 s"),
        (1.2e9, "1200 s"),
    ],
)
def test_microseconds(value: float | None, text: str) -> None:
    assert report.microseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1.0, "1.00x"), (9.996, "10.0x"), (99.96, "100x"), (112.3, "112x")],
)
def test_speedup(value: float | None, text: str) -> None:
    assert report.speedup(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.2 s"),
        (45.2, "45 s"),
        (60, "1 min"),
        (320, "5 min 20 s"),
        (3600, "1 h"),
        (3900, "1 h 5 min"),
    ],
)
def test_duration(value: float, text: str) -> None:
    assert report.duration(value) == text


def test_a_decision(printed) -> None:
    answer = {
        "path": "split",
        "partitions": 4,
        "tile": "r16",
        "source": "tuned",
        "reason": "tuned on this device 2026-11-29: " + "a long sentence that must wrap; " * 4,
        "expected_us": 17.2,
        "speedup": 112.0,
        "speedup_low": 108.0,
        "speedup_high": 118.0,
        "baseline": "mlx",
        "device": "cpu/x86_64-avx2/2c/24gb",
    }
    text = "\n".join(printed(report.decision(answer)))
    assert re.search(r"^plan +split x4 r16$", text, re.MULTILINE)
    assert re.search(r"^speed-up +112x \[108, 118\] over mlx$", text, re.MULTILINE)
    beside = "\n".join(printed(report.decision({**answer, "baseline": "mlx_rows"})))
    assert re.search(r"^speed-up +112x \[108, 118\] over mlx_rows$", beside, re.MULTILINE)
    unknown = {**answer, "expected_us": None, "speedup": None, "speedup_low": None}
    assert re.search(r"^speed-up +-$", "\n".join(printed(report.decision(unknown))), re.MULTILINE)


def test_the_steps_of_a_decision(printed) -> None:
    answer = {
        **dict.fromkeys(("expected_us", "speedup", "speedup_low", "speedup_high")),
        "path": "mlx",
        "partitions": 1,
        "tile": "",
        "source": "gates",
        "reason": "why",
        "device": "cpu/x86_64-avx2/2c/24gb",
        "steps": [
            {"step": "tuned", "answered": False, "reason": "not tuned", "details": []},
            {"step": "gates", "answered": True, "reason": "why " * 30, "details": ["built: yes"]},
        ],
    }
    lines = printed(report.decision(answer))
    assert "  tuned  not tuned" in lines
    assert "  gates  answers: why why" in "\n".join(lines)
    assert lines[-1] == "         - built: yes"


def bench_row(**changes: object) -> dict[str, object]:
    return {
        "shape": "context 32768 batch 1 heads 16 bfloat16 512+64 paged",
        "path": "split",
        "partitions": 64,
        "tile": "r128",
        "median_us": 123456.7,
        "p10_us": 111111.0,
        "p90_us": 222222.0,
        "ratio_to_mlx": 112.3,
        "gb_per_s": 12.3,
        "gflop_per_s": 1234.5,
        "max_error": 1.23e-3,
        "executed": "split x64 r128",
        "clock": "wall",
        **changes,
    }


def test_bench_tables(printed) -> None:
    failed = dict.fromkeys(
        ("median_us", "p10_us", "p90_us", "ratio_to_mlx", "gb_per_s", "gflop_per_s", "max_error")
    )
    rows = [
        bench_row(),
        bench_row(executed="split x63 r128"),
        bench_row(path="single", partitions=1, executed=None, **failed),
        bench_row(shape="another shape"),
    ]
    text = "\n".join(printed(report.benched(rows)))
    assert text.count("GFLOP/s") == 2  # one table a shape
    assert "split x64 r128" in text
    assert "ran" in text  # what ran differs from what was asked for
    assert "queue" not in text
    timed = "\n".join(printed(report.benched([bench_row(clock="gpu")])))
    assert "Times are the GPU's, with the queue full" in timed
    assert re.search(r"single r128 +- +- +- +- +- +- +-", text)


def tuned_row(shape: Shape, plan: Plan, *interval: float) -> Row:
    speedup, low, high = interval or (1.0, None, None)
    return Row(shape.bucket, plan, 3070.0, speedup, low, high, "2026-11-29", "digest", "0.32.4")


def test_the_end_of_a_tuning_run(printed) -> None:
    from mla_tuner import answers
    from mla_tuner.tuner import Summary

    wide = Shape(1 << 20, 8, 128, "float32", Geometry(256, 32), 8, "dense")
    rows = [
        tuned_row(SHAPE, Plan("split", 64, "r128"), 112.0, 108.0, 118.0),
        tuned_row(wide, MLX),
    ]
    reasons = [(wide.bucket, "needs about 900 s, 3 s are left")]
    summary = Summary(tuned=rows[:1], skipped_known=[wide.bucket], not_reached=reasons, seconds=300)
    summary.dropped, summary.paused_s = 12, 1.7
    summary.compiled = [("small r16", 2.6), ("merge", 1.0)]
    again = "mla-tune --budget 5m --db /a/path/" + "that/is/long/" * 8 + "tuning.db"
    answer = answers.tune_answer(summary, rows, make_device(), "/a/path/tuning.db", again)
    text = "\n".join(printed(report.tuned(answer)))
    assert re.search(r"32K b1 h16 bf16 +split x64 r128 +112x \[108, 118\] +3.07 ms +new", text)
    assert "12 rounds did not count, as MLX's path drifted; 2 s waited for that to pass." in text
    assert "2 kernels compiled in 4 s, the largest in 3 s." in text
    assert "mlx is best" in text
    assert "over mlx_rows" not in text
    assert "1 bucket tuned in 5 min, 1 tuned before." in text
    assert "1 not reached:" in text
    assert "To continue:   mla-tune --budget 5m" in text
    assert "/a/path/tuning.db" in text
    assert "mla-tune plan" in text


def test_a_start_says_what_is_tuned_and_since_when() -> None:
    device = make_device()
    first = report.start(RunStarted(device, 300, 48, ()))
    assert first == f"Tuning {device.key} (test): 48 buckets, 5 min."
    again = report.start(RunStarted(device, 300, 48, ("2026-11-29", "2026-11-30")))
    assert again.endswith(
        "46 buckets, 5 min. 2 of 48 are tuned already (2026-11-29 to 2026-11-30)."
    )
    last = report.start(RunStarted(device, 1, 2, ("2026-11-29",)))
    assert last.endswith("1 bucket, 1 s. 1 of 2 is tuned already (2026-11-29).")


def test_verified(printed) -> None:
    plan_row = {
        "bucket": "32K b1 h16 bf16",
        "path": "split",
        "partitions": 2,
        "tile": "r16",
        "stored_speedup": 2.0,
        "speedup": 0.9,
        "speedup_low": 0.8,
        "speedup_high": 0.95,
        "result": "slower",
        "reason": "",
    }
    kernel = {"isa": "avx2", "variant": "split r16", "cases": 24, "max_error": 2e-3}
    answer = {
        "kernels": [
            {**kernel, "ok": True, "reason": ""},
            {**kernel, "ok": False, "reason": "context 300: row error 1e-1 exceeds 2.5e-3"},
        ],
        "plans": [plan_row],
        "not_timed": 1,
    }
    text = "\n".join(printed(report.verified(answer)))
    assert "exceeds" in text
    assert re.search(r"2.00x +0.90x \[0.80, 0.95\] +slower", text)
    assert "Not timed again: 1 stored plan." in text


def test_progress_off_a_terminal_keeps_only_what_is_finished(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket, plan = SHAPE.bucket, Plan("split", 2, "r16")
    with report.Progress() as progress:
        progress(RunStarted(make_device(), 300, 48, ()))
        progress(BucketStarted(bucket, 3, 48, 5.0))
        progress(CandidateMeasured(bucket, Measurement(SHAPE, plan, median_us=90.0)))
        progress(BucketTuned(bucket, tuned_row(SHAPE, plan, 112.0, 108.0, 118.0), 4.2))
        progress(BucketStarted(bucket, 4, 48, 5.0))
        progress(BucketTuned(bucket, tuned_row(SHAPE, MLX), 4.2))
        progress(BucketSkipped(bucket, "the budget was used up"))
        progress.measured(Measurement(SHAPE, plan))
        progress.measured(Measurement(SHAPE, plan, "wrong", "row error 0.5"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "Tuning cpu/x86_64-avx2/2c/24gb (test): 48 buckets, 5 min.",
        "3/48  32K b1 h16 bf16: split x2 r16, 112x (4 s)",
        "4/48  32K b1 h16 bf16: mlx is best (4 s)",
        "32K b1 h16 bf16: split x2 r16 wrong: row error 0.5",
    ]


def test_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with report.Progress() as progress:
        progress(BucketStarted(SHAPE.bucket, 1, 2, 5.0))
        progress.note("working")
        progress.line("a line that stays")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a line that stays" in captured.err


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 0, 0), "0 plans for this device"),
        ((1, 0, 0), "1 plan for this device"),
        ((0, 2, 0), "0 plans for this device, 2 of another MLX, OS or driver: run mla-tune verify"),
        ((5, 0, 3), "5 plans for this device, 3 of another kernel: run mla-tune"),
    ],
)
def test_database_state(counts: tuple[int, int, int], text: str) -> None:
    plans, other_mlx, other_kernel = counts
    db = {"plans": plans, "other_mlx": other_mlx, "other_kernel": other_kernel, "problem": ""}
    assert report._db_state({**db, "exists": True}) == text
    assert report._db_state({**db, "exists": False}) == "not there yet: run mla-tune"
    assert report._db_state({**db, "exists": False, "problem": "a folder"}) == "a folder"
