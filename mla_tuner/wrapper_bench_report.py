"""The report of a wrapper benchmark as text, CSV and chart; all from its JSON values."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .answers import tokens
from .errors import TunerError
from .plan import PATHS
from .words import counted
from .wrapper_bench_chart import svg

Answer = Mapping[str, Any]
Row = Mapping[str, Any]
NO_PNG = "a PNG needs cairosvg: pip install 'mla-tuner[chart]', or write FILE.svg"


def write_files(answer: Answer, files: Mapping[str, Path | None]) -> None:
    """Writes those of `csv`, `markdown` and `chart` that a path is given for.

    Raises:
        TunerError: one line, once all others are written: which can't be, and why.
    """
    problems = []
    for kind, path in files.items():
        if path is None:
            continue
        try:
            path.write_bytes(_KINDS[kind](answer, path))
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    if problems:
        raise TunerError(f"cannot write {'; '.join(problems)}")


def check_files(files: Mapping[str, Path | None]) -> None:
    """Whether `write_files` will do, as far as that can be told before anything is measured.

    Raises:
        TunerError: one line: a file that can't be written or is named twice, or a chart that is
            neither SVG nor PNG, or a PNG without the package for it.
    """
    chart, paths = files.get("chart"), [path for path in files.values() if path]
    if len(set(paths)) < len(paths):
        raise TunerError(f"expected a file for each report; got {', '.join(map(str, paths))}")
    for path in paths:
        place = path if os.access(path, os.F_OK) else path.parent
        if not os.access(place, os.W_OK):
            raise TunerError(f"cannot write {path}: {place} is missing or read-only")
    if chart and chart.suffix not in (".svg", ".png"):
        raise TunerError(f"expected a chart named .svg or .png; got {chart}")
    if chart and chart.suffix == ".png":
        _png_of()


def markdown(answer: Answer) -> str:
    """What was measured, where and with what; a table for each dtype, heads and layout."""
    return "\n".join([*_head(answer), *_tables(answer["rows"]), *_left_out(answer), ""])


def _head(answer: Answer) -> Iterator[str]:
    software = ", ".join(f"{name} {value}" for name, value in answer["software"].items())
    clock = "GPU time, queue full" if answer["clock"] == "gpu" else "wall clock"
    yield f"- device: {answer['device']} ({answer['name']})"
    yield f"- software: {software}"
    yield f"- command: `{answer['command']}`"
    yield f"- when: {answer['at']}; trials: {answer['trials']}; {clock}"
    for module in answer["modules"]:
        yield (
            "- module: {name}: hidden {hidden_size}, q_lora_rank {q_lora_rank}, "
            "qk_nope_head_dim {qk_nope_head_dim}, v_head_dim {v_head_dim}".format(**module)
        )
    yield "- each cell: median [min, max] in ms of one step; speed-up over mlx; plan that ran"


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    paths = [path for path in PATHS if any(row["path"] == path for row in rows)]
    for title, of_table in grouped(rows, table_of).items():
        yield f"\n### {title}\n"
        yield "| batch | context | " + " | ".join(paths) + " |"
        yield "|---" * (2 + len(paths)) + "|"
        for (batch, context), cells in grouped(of_table, _shape_of).items():
            texts = ["; ".join(_cell(row) for row in cells if row["path"] == p) for p in paths]
            yield f"| {batch} | {tokens(context)} | " + " | ".join(texts) + " |"


def table_of(row: Row) -> str:
    """What the rows of one table, and of one panel of the chart, have in common."""
    q_len = f", q_len {row['q_len']}" if row["q_len"] > 1 else ""
    heads = counted(row["heads"], "head")
    return f"{row['dtype']}, {heads}, {row['geometry']}, {row['layout']}{q_len}"


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by what `key` says of them, in their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _shape_of(row: Row) -> tuple[int, int]:
    return row["batch"], row["context"]


def _cell(row: Row) -> str:
    if row["median_us"] is None:
        return " ".join(row["problem"].split()).replace("|", r"\|")  # one cell of the table
    median, low, high = (f"{row[name] / 1e3:.4g}" for name in ("median_us", "min_us", "max_us"))
    text = f"{median} [{low}, {high}]"
    if row["path"] == "mlx":
        return text
    ratio = "" if row["ratio_to_mlx"] is None else f"; {row['ratio_to_mlx']:.3g}x"
    return f"{text}{ratio}; {row['executed']}"


def _left_out(answer: Answer) -> Iterator[str]:
    if answer["left_out"]:
        yield f"\nLeft out, {len(answer['left_out'])}:\n"
    for each in answer["left_out"]:
        yield f"- {each['shape']}: {each['reason']}"


def _csv(answer: Answer, path: Path) -> bytes:
    """A line for each latency: what was asked for and ran, the trial, the round, microseconds."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["device", "mlx", *_COLUMNS, "trial", "round", "us"])
    for row in answer["rows"]:
        told = [answer["device"], answer["software"]["mlx"], *(row[name] for name in _COLUMNS)]
        trials = row["latencies_us"] or [[None]]
        for trial, samples in enumerate(trials, 1):
            out.writerows([*told, trial, at, us] for at, us in enumerate(samples, 1))
    return text.getvalue().encode()


_COLUMNS = (
    *("module", "dtype", "heads", "batch", "context", "geometry", "layout", "q_len"),
    *("path", "partitions", "tile", "executed", "max_error", "problem"),
)


def _chart(answer: Answer, path: Path) -> bytes:
    panels = grouped(answer["rows"], table_of)
    text = svg(panels, f"{answer['device']}, MLX {answer['software']['mlx']}, {answer['at'][:10]}")
    return _png_of()(text) if path.suffix == ".png" else text.encode()


def _png_of() -> Callable[[str], bytes]:
    try:
        from cairosvg import svg2png  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:  # OSError: the package without its library
        raise TunerError(NO_PNG) from error
    return lambda text: bytes(svg2png(bytestring=text.encode(), scale=2))


_KINDS: dict[str, Callable[[Answer, Path], bytes]] = {
    "csv": _csv,
    "markdown": lambda answer, path: markdown(answer).encode(),
    "chart": _chart,
}
