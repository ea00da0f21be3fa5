"""`mla-tune bench --wrapper`: what is timed, what is left out, and the report with its files."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from commands import answer, error, run
from fakes import FakeBackend, FakeRunners, make_device

from mla_tuner import bench, cli, ops, wrapper_bench, wrapper_bench_report, wrapper_bench_runner
from mla_tuner.device import GB, probe
from mla_tuner.evidence import MIN_ROUNDS, Measurement
from mla_tuner.measure import Checked
from mla_tuner.plan import MLX, PATHS, Plan
from mla_tuner.shapes import Shape
from mla_tuner.wrapper_bench_chart import _ticks
from mla_tuner.wrapper_bench_runner import ModuleRunners
from mla_tuner.wrapper_bench_widths import Widths

TINY = Widths("tiny", 64, 0, 16, 16)
WIDTHS = dict.fromkeys((1, 2, 4, 16, 64, 128), TINY)
SPLIT = Plan("split", 2, "r16")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def modules(fake: FakeRunners, monkeypatch: pytest.MonkeyPatch) -> FakeRunners:
    """Modules on the CPU of the fixture `fake`."""
    monkeypatch.setattr(wrapper_bench, "IsolatedModules", lambda device, widths: fake)
    return fake


def found(
    shapes: list[Shape],
    plans: Callable[[Shape], list[Plan]] = lambda shape: [MLX, SPLIT],
    **more: Any,
) -> dict[str, Any]:
    options = {"budget_s": 3600.0, "trials": 2, **more}
    device = make_device()
    measured = wrapper_bench.run(shapes, plans, device, WIDTHS, **options)
    return wrapper_bench.report(measured, device, WIDTHS, options["trials"], "mla-tune bench ...")


# --- running -------------------------------------------------------------------------------------


def test_every_trial_has_its_latencies(modules: FakeRunners) -> None:
    report = found([Shape(4096, 1, 16)], trials=3)
    rows = {row["path"]: row for row in report["rows"]}
    assert list(rows) == ["mlx", "split"]
    assert rows["split"]["median_us"] == pytest.approx(500)
    assert rows["split"]["ratio_to_mlx"] == pytest.approx(18)
    assert rows["split"]["executed"] == "split x2 r16"
    for row in rows.values():
        assert len(row["latencies_us"]) == 3
        assert min(map(len, row["latencies_us"])) >= MIN_ROUNDS
        assert row["min_us"] <= row["median_us"] <= row["max_us"]
    assert report["left_out"] == []
    assert len(modules.made) == 1  # one runner, so that a plan is checked once for all trials


def test_trials_shuffle_anew(modules: FakeRunners) -> None:
    found([Shape(4096, 1, 16)], lambda shape: [MLX, Plan("single"), SPLIT], trials=2)
    assert modules.last is not None
    assert len({tuple(modules.last.calls[at : at + 3]) for at in range(12, 40, 3)}) > 1


def test_cheap_shapes_come_first_and_the_budget_leaves_out_the_rest(modules: FakeRunners) -> None:
    def seconds(shape: Shape, plan: Plan) -> float:
        return shape.context * 1e-3

    modules.seconds = seconds
    shapes = [Shape(context, 1, 16) for context in (65536, 256, 16384)]
    report = found(shapes, budget_s=100.0)
    assert [shape.context for shape in modules.made] == [256]
    assert [each["shape"].split()[1] for each in report["left_out"]] == ["16384", "65536"]
    assert all("s are left" in each["reason"] for each in report["left_out"])
    report = found(shapes, budget_s=0.0)
    assert {each["reason"] for each in report["left_out"]} == {"the budget was used up"}
    assert report["rows"] == []


def test_a_short_budget_makes_every_trial_shorter(
    modules: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes 9.5 s: without a share of its own the first trial takes all that is left."""
    monkeypatch.setattr(wrapper_bench, "perf_counter", modules.now)
    modules.seconds = lambda shape, plan: 9.0 if plan == MLX else 0.5
    report = found([Shape(4096, 1, 16)], budget_s=100.0, trials=3)
    for row in report["rows"]:
        rounds = list(map(len, row["latencies_us"]))
        assert len(rounds) == 3
        assert max(rounds) - min(rounds) <= 1


def test_a_budget_that_ends_in_the_first_trial_ends_all(
    modules: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper_bench, "perf_counter", modules.now)
    modules.seconds = lambda shape, plan: 100.0
    told: list[Measurement] = []
    report = found([Shape(4096, 1, 16)], budget_s=10.0, trials=3, progress=told.append)
    assert [(each.plan, each.status) for each in told] == [(MLX, "timeout"), (SPLIT, "timeout")]
    assert {row["problem"] for row in report["rows"]} == {told[0].message}


def test_the_estimate_passes_over_shapes_without_times(modules: FakeRunners) -> None:
    modules.seconds = lambda shape, plan: -1.0 if shape.context == 512 else shape.context * 1e-3
    report = found([Shape(context, 1, 16) for context in (256, 512, 65536)], budget_s=100.0)
    assert [shape.context for shape in modules.made] == [256, 512]
    assert len(report["left_out"]) == 1


def test_what_fails_has_a_row_with_its_reason(
    modules: FakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Plan("single", 1, "r16")
    backend = FakeBackend(refused=(refused,))
    monkeypatch.setattr(bench.backends, "get", lambda name: backend)
    modules.options["check_result"] = lambda plan: Checked(plan == MLX, 0.5, "row error 0.5", 1e-4)
    report = found([Shape(4096, 1, 16)], lambda shape: [MLX, SPLIT, refused, Plan("split", 200)])
    problems = {row["path"] + str(row["partitions"]): row["problem"] for row in report["rows"]}
    assert problems.pop("split200").startswith("context 4096 makes only 64 pieces")
    assert problems == {"mlx1": "", "split2": "row error 0.5", "single1": f"{refused} is refused"}
    assert [row["median_us"] is None for row in report["rows"]] == [False, True, True, True]
    text = wrapper_bench_report.markdown(report)
    assert "row error 0.5" in text
    report["rows"][1]["problem"] = "line 1: |\n  error: a || b\n"
    text = wrapper_bench_report.markdown(report)
    assert r"| line 1: \| error: a \|\| b; context 4096 makes" in text
    assert len(read_csv(report)) == 1 + sum(map(len, report["rows"][0]["latencies_us"])) + 3


def test_another_plan_than_the_one_asked_for_is_no_time(modules: FakeRunners) -> None:
    modules.options["executed"] = lambda plan: MLX
    report = found([Shape(4096, 1, 16)])
    assert [row["median_us"] is None for row in report["rows"]] == [False, True]
    assert report["rows"][1]["problem"] == f"asked for {SPLIT}, but mlx ran"


def test_a_context_holds_its_new_tokens(modules: FakeRunners) -> None:
    report = found([Shape(3, 1, 16, q_len=4)], lambda shape: [MLX])
    assert report["rows"][0]["problem"] == "context 3 does not hold 4 new tokens"


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_on_this_machine_each_path_runs_and_is_held_to_float64(layout: str) -> None:
    runner = ModuleRunners(probe("cpu"), WIDTHS)(Shape(200, 3, 4, "float32", layout=layout), 0)
    for plan in (MLX, Plan("single"), Plan("split", 2)):
        checked = runner.check(plan)
        assert checked.ok, checked.reason
        assert 0 < checked.max_error < 1e-5
        seconds, executed = runner.sample(plan, 3)
        assert seconds > 0
        assert executed is not None
        assert (executed.path, executed.partitions) == (plan.path, plan.partitions)


@pytest.mark.usefixtures("kernel")
def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any sequence of those that are checked; here the last."""
    decode = ops.mla_decode

    def wrong(*args: Any, **options: Any) -> Any:
        out = decode(*args, **options)
        out[-1] = out[-1] * 1.01
        return out

    runner = ModuleRunners(probe("cpu"), WIDTHS)(Shape(200, 3, 4, "float32"), 0)
    monkeypatch.setattr(wrapper_bench_runner.ops, "mla_decode", wrong)
    checked = runner.check(Plan("single"))
    assert not checked.ok
    assert "row error 1.00e-02" in checked.reason


@pytest.mark.parametrize("widths", [TINY._replace(hidden_size=1 << 40)])
def test_a_module_that_does_not_fit_is_refused_before_it_is_made(
    widths: Widths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper_bench_runner, "make_weights", lambda *args: pytest.fail("made"))
    runner = ModuleRunners(make_device(), {4: widths})(Shape(64, 1, 4), 0)
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"a layer takes .* GiB; no more than"):
            runner.check(MLX)


def test_rings_are_cold_and_bounded() -> None:
    device = make_device()  # 32 MB of cache, 24 GB
    runners = ModuleRunners(device, WIDTHS)
    assert runners.copies(64 << 20) == 3
    assert runners.copies(1) == 64
    assert runners.copies(5 * GB) == 1
    with pytest.raises(MemoryError, match=r"a layer takes 7\.0 GiB; no more than 6\.0 may"):
        runners.copies(7 * GB)
    shape = Shape(64, 1, 4)
    first = runners.weights(shape, 0)
    assert runners.weights(shape, 64) is first
    assert runners.weights(shape, 1) is not first
    assert runners.weights(Shape(64, 1, 2), 0) is not first


@pytest.mark.usefixtures("kernel")
def test_the_command_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = {"num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= TINY._asdict() | {"q_lora_rank": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = answer(
        *("bench", "--wrapper", "--model", str(tmp_path), "--contexts", "200", "--device", "cpu"),
        *("--layouts", "paged,dense", "--trials", "1", "--budget", "1m"),
    )
    assert [row["path"] for row in report["rows"]].count("split") == 2
    for row in report["rows"]:
        assert row["executed"] == str(Plan(row["path"], row["partitions"], row["tile"]))
        assert row["median_us"] > 0
        assert row["max_error"] < 6e-2


# --- the report ----------------------------------------------------------------------------------


@pytest.fixture
def report(modules: FakeRunners) -> dict[str, Any]:
    shapes = [Shape(c, b, h) for h in (16, 64) for b in (1, 8) for c in (4096, 8192)]
    return found(shapes)


def read_csv(report: dict[str, Any]) -> list[list[str]]:
    text = wrapper_bench_report._csv(report, Path("x.csv")).decode()
    return list(csv.reader(text.splitlines()))


def test_markdown_says_where_and_with_what(report: dict[str, Any]) -> None:
    text = wrapper_bench_report.markdown(report)
    assert report["device"] in text
    assert "`mla-tune bench ...`" in text
    assert f"mlx {report['software']['mlx']}" in text
    assert "trials: 2; wall clock" in text
    assert "tiny: hidden 64" in text
    for heads in (16, 64):
        assert f"### bfloat16, {heads} heads, 512+64, paged" in text
    assert "| 8 | 8K | 9 [9, 9] | 0.5 [0.5, 0.5]; 18x; split x2 r16 |" in text
    assert "Left out" not in text


def test_csv_has_every_latency(report: dict[str, Any]) -> None:
    head, *lines = read_csv(report)
    samples = [us for row in report["rows"] for trial in row["latencies_us"] for us in trial]
    assert [float(line[-1]) for line in lines] == samples
    first = dict(zip(head, lines[0], strict=True))
    assert first["device"] == report["device"]
    assert (first["heads"], first["batch"], first["context"], first["path"], first["trial"]) == (
        *("16", "1", "4096", "mlx", "1"),
    )


def test_the_chart_has_a_mark_and_whiskers_a_row(report: dict[str, Any]) -> None:
    report["rows"][0].update(min_us=4000.0, max_us=20000.0)
    report["rows"][-1].update(median_us=None, min_us=None, max_us=None)
    tree = ElementTree.fromstring(wrapper_bench_report._chart(report, Path("x.svg")))
    assert len(list(tree.iter(f"{SVG}circle"))) == 8 + 1  # and one in the legend
    assert len(list(tree.iter(f"{SVG}polygon"))) == 7 + 1
    texts = [each.text or "" for each in tree.iter(f"{SVG}text")]
    assert any(report["device"] in text for text in texts)
    assert texts.count("4K") == texts.count("8K") == texts.count("b8") == 4
    panel = next(tree.iter(f"{SVG}g"))
    lines = [
        each.attrib for each in panel.iter(f"{SVG}line") if each.attrib["x1"] == each.attrib["x2"]
    ]
    assert max(abs(float(line["y1"]) - float(line["y2"])) for line in lines) > 20
    heights = [float(each.attrib["cy"]) for each in panel.iter(f"{SVG}circle")]
    assert all(28 <= height <= 206 for height in heights)


def texts_beyond(chart: bytes) -> list[str]:
    """Texts that don't end within the chart, by the usual width of letters."""
    tree = ElementTree.fromstring(chart)
    wide, found = float(tree.attrib["width"]), []
    for group in (tree, *tree.iter(f"{SVG}g")):
        for each in group.findall(f"{SVG}text"):
            length = len(each.text or "") * 0.56 * float(each.attrib["font-size"])
            if each.attrib["text-anchor"] == "start" and float(each.attrib["x"]) + length > wide:
                found.append(each.text or "")
    return found


@pytest.mark.parametrize("device", ["cpu/x86_64-avx2/2c/24gb", "metal/applegpu_g17s/20c/128gb"])
def test_a_chart_of_one_shape_holds_its_texts(report: dict[str, Any], device: str) -> None:
    one = {**report, "device": device, "rows": report["rows"][:2]}
    assert texts_beyond(wrapper_bench_report._chart(one, Path("x.svg"))) == []
    paths = [{**report["rows"][0], "path": path} for path in PATHS]
    assert texts_beyond(wrapper_bench_report._chart({**one, "rows": paths}, Path("x.svg"))) == []


def test_a_chart_of_nothing_is_a_chart(report: dict[str, Any]) -> None:
    rows = [{**row, "median_us": None} for row in report["rows"]]
    for none in ([], rows):
        chart = wrapper_bench_report._chart({**report, "rows": none}, Path("x.svg"))
        tree = ElementTree.fromstring(chart)
        assert list(tree.iter(f"{SVG}g")) == list(tree.iter(f"{SVG}circle")) == []
        assert texts_beyond(chart) == []


def test_plans_of_one_path_stand_side_by_side(report: dict[str, Any]) -> None:
    (mlx, split), others = report["rows"][:2], (4, 8)
    rows = [mlx, split, *({**split, "partitions": count} for count in others)]
    tree = ElementTree.fromstring(
        wrapper_bench_report._chart({**report, "rows": rows}, Path("x.svg"))
    )
    (panel,) = tree.iter(f"{SVG}g")
    places = {each.attrib["points"] for each in panel.iter(f"{SVG}polygon")}
    assert len(places) == 3


@pytest.mark.parametrize("low", [999.9999999999999, 1000.0, 1000.0000000000001, 1e-3, 3.7, 2e9])
@pytest.mark.parametrize("wider", [1.0, 1.0000000000000002, 1.7, 1e4])
def test_ticks_reach_around_every_value(low: float, wider: float) -> None:
    ticks = _ticks(low, low * wider)
    assert ticks[0] <= low <= low * wider <= ticks[-1]
    assert len(ticks) > 1


def test_a_png_is_made_where_there_is_a_library(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.png"
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(wrapper_bench_report.TunerError, match="a PNG needs cairosvg"):
        wrapper_bench_report.check_files({"chart": path})
    stub = SimpleNamespace(svg2png=lambda bytestring, scale: b"PNG" + bytestring[:4])
    monkeypatch.setitem(sys.modules, "cairosvg", stub)
    wrapper_bench_report.check_files({"chart": path})
    wrapper_bench_report.write_files(report, {"chart": path, "csv": None})
    assert path.read_bytes() == b"PNG<svg"


# --- the command ---------------------------------------------------------------------------------


def test_grids_and_files(modules: FakeRunners, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"a.{kind}" for kind in ("csv", "markdown", "svg")}
    args = ["bench", "--wrapper", "--grid", "upstream", "--trials", "1", "--budget", "1h"]
    args += ["--csv", str(files["csv"]), "--markdown", str(files["markdown"])]
    report = answer(*args, "--chart", str(files["svg"]))
    shapes = {(r["heads"], r["batch"], r["context"], r["dtype"]) for r in report["rows"]}
    assert len(shapes) == 54
    assert "--grid upstream" in report["command"]
    assert {row["path"] for row in report["rows"]} == {"mlx", "single", "split"}
    assert {each["name"] for each in report["modules"]} == {"DeepSeek-V2-Lite", "DeepSeek-V3"}
    assert files["markdown"].read_text().count("###") == 6
    assert ElementTree.parse(files["svg"]).getroot().tag == f"{SVG}svg"
    assert files["csv"].read_text().count("\n") > 54 * 3 * MIN_ROUNDS


def test_the_long_grid_is_there_without_modules_too(modules: FakeRunners) -> None:
    rows = answer("bench", "--grid", "long", "--paths", "split", "--budget", "1h")
    assert len({row["shape"] for row in rows}) == 36
    assert {"context 131072 batch 8 heads 128 float16 512+64 paged"} <= {r["shape"] for r in rows}


def test_the_report_is_what_is_printed(modules: FakeRunners) -> None:
    done = run(
        "bench", "--wrapper", "--contexts", "4k", "--trials", "1", "--model", "GLM-4.7-Flash"
    )
    assert "GLM-4.7-Flash: hidden 2048, q_lora_rank 768" in done.stdout
    assert "### bfloat16, 20 heads" in done.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--csv", "x"], "only with --wrapper: --csv"),
        (["--trials", "2", "--chart", "x.svg"], "only with --wrapper: --trials, --chart"),
        (["--wrapper", "--lengths", "5,6"], "no ragged batches: leave out --lengths"),
        (["--wrapper", "--grid", "long", "--lengths", "5,6"], "leave out --lengths"),
        (["--grid", "long", "--heads", "16"], "--grid says it all: leave out --heads"),
        (["--grid", "short"], "expected one of upstream, long"),
        (["--wrapper", "--paths", "single", "--partitions", "2"], "--paths leaves out"),
    ],
)
def test_options_that_contradict_each_other(
    modules: FakeRunners, args: list[str], text: str
) -> None:
    done = CliRunner().invoke(cli.main, ["bench", *args])
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())


def test_known_failures_are_one_line_before_anything_is_measured(
    modules: FakeRunners, tmp_path: Path
) -> None:
    bench_it = ("bench", "--wrapper", "--contexts", "4k")
    assert "named .svg or .png" in error(*bench_it, "--chart", "x.gif")
    assert "give its config.json" in error(*bench_it, "--model", "GLM-5")
    for kind in ("--csv", "--markdown", "--chart"):
        path = tmp_path / "no" / "x.svg"
        assert f"cannot write {path}: {path.parent} is missing" in error(*bench_it, kind, str(path))
    same = str(tmp_path / "same.svg")
    assert "a file for each report" in error(*bench_it, "--csv", same, "--chart", same)
    assert modules.made == []


def test_a_file_that_fails_in_the_end_costs_no_other(modules: FakeRunners, tmp_path: Path) -> None:
    long, good = tmp_path / ("x" * 300), tmp_path / "a.md"
    bench_it = ("bench", "--wrapper", "--contexts", "4k")
    done = run(*bench_it, "--csv", str(long), "--markdown", str(good), code=1)
    assert f"Error: cannot write {long}: File name too long" in done.stderr
    assert "### bfloat16" in done.stdout
    assert good.read_text() in done.stdout


def test_nothing_timed_is_an_error(modules: FakeRunners) -> None:
    bench_it = ("bench", "--wrapper", "--contexts", "4k")
    modules.options["check_result"] = lambda plan: Checked(False, 1.0, "wrong", 1e-4)
    done = run(*bench_it, code=1)
    assert "nothing could be timed" in done.stderr
