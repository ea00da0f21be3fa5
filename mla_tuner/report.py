"""Answers as text for people: readable numbers, tables that fit 80 columns, progress on stderr.

The only importer of rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from .answers import plan_of, short
from .shapes import DEEPSEEK
from .words import counted

if TYPE_CHECKING:
    from .evidence import Measurement
    from .tuner import Event, RunStarted

Answer = Mapping[str, Any]
MOST_LISTED = 10  # buckets that a run did not reach; a full grid has dozens


def show(parts: Iterable[RenderableType]) -> None:
    """Print results to stdout. Lines are not broken: commands and paths in them get copied."""
    console = Console(markup=False, highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, (str, Text)))


# --- numbers -----------------------------------------------------------------------------------


def microseconds(value: float | None) -> str:
    """Three digits and a unit: `870 ns`, `14.2 us`, `3.07 ms`, `1.50 s`; `-` for None."""
    if value is None:
        return "-"
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "us"), (1e6, 1e-3, "ms")):
        if value < limit * 0.9995:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e-6)} s"


def speedup(value: float | None) -> str:
    """`112x`, `1.07x`; `-` for None."""
    return "-" if value is None else f"{_digits(value)}x"


def speedup_interval(answer: Answer) -> str:
    """`1.94x [1.91, 1.97]` from an answer's three numbers; what is None is left out."""
    low, high = answer["speedup_low"], answer["speedup_high"]
    text = speedup(answer["speedup"])
    return text if low is None or high is None else f"{text} [{_digits(low)}, {_digits(high)}]"


def duration(seconds: float) -> str:
    """`0.3 s`, `45 s`, `5 min 20 s`, `1 h 5 min`."""
    if seconds < 1:
        return f"{seconds:.1g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small, units = (
        (whole // 60, whole % 60, ("min", "s"))
        if whole < 3600
        else (whole // 3600, whole % 3600 // 60, ("h", "min"))
    )
    return f"{large} {units[0]}" + (f" {small} {units[1]}" if small else "")


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


# --- answers -----------------------------------------------------------------------------------


def start(event: RunStarted) -> str:
    """What a tuning run is about to do."""
    device, total, days = event.device, event.total, event.days
    left = counted(total - len(days), "bucket")
    text = f"Tuning {device.key} ({device.name}): {left}, {duration(event.budget_s)}."
    if days:
        since = min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"
        are = "is" if len(days) == 1 else "are"
        text += f" {len(days)} of {total} {are} tuned already ({since})."
    return text


def tuned(answer: Answer) -> Iterator[RenderableType]:
    """The end of a tuning run."""
    if answer["plans"]:
        yield _winners(answer["plans"])
    yield (
        f"{counted(answer['tuned'], 'bucket')} tuned in {duration(answer['seconds'])}, "
        f"{answer['already_tuned']} tuned before."
    )
    if answer["dropped_rounds"]:
        yield (
            f"{counted(answer['dropped_rounds'], 'round')} did not count, as MLX's path drifted; "
            f"{duration(answer['paused_s'])} waited for that to pass."
        )
    if answer["compiled"]:
        seconds = [each["seconds"] for each in answer["compiled"]]
        yield (
            f"{counted(len(seconds), 'kernel')} compiled in {duration(sum(seconds))}, "
            f"the largest in {duration(max(seconds))}."
        )
    for kind, title in (("failed", "failed"), ("not_reached", "not reached")):
        rows = answer[kind]
        if rows:
            yield f"\n{len(rows)} {title}:"
            yield _facts([(f"  {row['bucket']}", row["reason"]) for row in rows[:MOST_LISTED]])
        if len(rows) > MOST_LISTED:
            yield f"  ... and {len(rows) - MOST_LISTED} more: --json lists all"
    if answer["continue"]:
        yield Text(f"\nTo continue:   {answer['continue']}")
        yield "What needs more than the whole budget waits for a longer --budget."
    yield Text(f"\nDatabase:      {answer['db']}", overflow="fold")
    yield "Serving reads it at a process's first mla_tuner.mla_decode(...)."
    yield "Running servers keep the old table: restart them."
    if answer["device"].startswith("cpu/"):
        yield "MLX's CPU build is slow (reference BLAS): these factors say nothing about GPUs."
    if answer["plans"]:
        yield Text(f"What it runs:  mla-tune plan {_as_options(answer['plans'][-1])}")


def _as_options(row: Answer) -> str:
    """What asks `mla-tune plan` for a bucket; without what is so by default."""
    geometry = "{kv_lora_rank}+{rope_dim}".format(**row)
    options = (
        *(("context", row["context"], None), ("batch", row["batch"], None)),
        *(("heads", row["heads"], None), ("dtype", row["dtype"], "bfloat16")),
        *(("q-len", row["q_len"], 1), ("layout", row["layout"], "paged")),
        ("geometry", geometry, str(DEEPSEEK)),
    )
    return " ".join(f"--{name} {value}" for name, value, usual in options if value != usual)


def _winners(rows: Sequence[Answer]) -> Table:
    table = _table("bucket", "plan", "speed-up over mlx", "time", "day", left=2)
    for row in rows:
        name = row["baseline"]
        span = f"{name} is best" if row["path"] == name else speedup_interval(row) + _beside(name)
        day = "new" if row["new"] else row["day"]
        table.add_row(row["bucket"], str(plan_of(row)), span, microseconds(row["expected_us"]), day)
    return table


def _beside(baseline: str) -> str:
    """What a speed-up is over where it is not over `mlx`."""
    return "" if baseline == "mlx" else f" over {baseline}"


def decision(answer: Answer) -> Iterator[RenderableType]:
    """The answer of `mla-tune plan`."""
    span = speedup_interval(answer)
    if answer["speedup"] is not None:
        span += f" over {answer['baseline']}"
    yield _facts(
        [
            ("plan", plan_of(answer)),
            ("source", answer["source"]),
            ("reason", answer["reason"]),
            ("expected", microseconds(answer["expected_us"])),
            ("speed-up", span),
            ("device", answer["device"]),
        ]
    )
    if "steps" in answer:
        yield "\nThe look-up, first answer wins:"
        yield _facts([line for step in answer["steps"] for line in _step_lines(step)])


def _step_lines(step: Answer) -> Iterator[tuple[str, object]]:
    answered = "answers: " if step["answered"] else ""
    yield f"  {step['step']}", f"{answered}{step['reason']}"
    for detail in step["details"]:
        yield "", f"- {detail}"


def benched(rows: Sequence[Answer]) -> Iterator[RenderableType]:
    """The answer of `mla-tune bench`: one table a shape."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        yield Text(shape, style="bold")
        table = _table("plan", "median", "p10", "p90", "GB/s", "GFLOP/s", "vs mlx", "error")
        for row in rows:
            if row["shape"] == shape:
                table.add_row(*_bench_cells(row))
        yield table
    if any(row["clock"] == "gpu" for row in rows):
        yield "Times are the GPU's, with the queue full: what a call costs a model."


def _bench_cells(row: Answer) -> list[str]:
    plan = str(plan_of(row))
    if row["executed"] not in (None, plan):
        plan += f" (ran {row['executed']})"
    rates = [row["gb_per_s"], row["gflop_per_s"]]
    error = row["max_error"]
    return [
        plan,
        *(microseconds(row[name]) for name in ("median_us", "p10_us", "p90_us")),
        *("-" if rate is None else _digits(rate) for rate in rates),
        speedup(row["ratio_to_mlx"]),
        "-" if error is None else f"{error:.0e}",
    ]


def verified(answer: Answer) -> Iterator[RenderableType]:
    """The answer of `mla-tune verify`."""
    table = _table("kernel", "variant", "cases", "max error", "result", left=2)
    for row in answer["kernels"]:
        result = "ok" if row["ok"] else row["reason"]
        table.add_row(
            row["isa"], row["variant"], str(row["cases"]), f"{row['max_error']:.0e}", result
        )
    yield table
    if answer["plans"]:
        table = _table("bucket", "plan", "stored", "now", "result", left=2)
        for row in answer["plans"]:
            result = f"{row['result']}: {row['reason']}" if row["reason"] else row["result"]
            stored = speedup(row["stored_speedup"])
            table.add_row(row["bucket"], str(plan_of(row)), stored, speedup_interval(row), result)
        yield table
    if answer["not_timed"]:
        left = counted(answer["not_timed"], "stored plan")
        yield f"Not timed again: {left}. A longer --budget takes more of them."


def overviewed(answer: Answer) -> Iterator[RenderableType]:
    """The answer of `mla-tune probe`."""
    cores = "unknown" if answer["cores"] is None else answer["cores"]
    yield _facts(
        [
            ("device", answer["device"]),
            ("name", answer["name"]),
            ("family", answer["family"]),
            ("cores", cores),
            ("memory", f"{answer['memory_gb']} GB"),
            (
                "cache",
                f"{answer['cache_bytes'] / 2**20:.0f} MB last level ({answer['cache_source']})",
            ),
            ("software", _pairs(answer["software"])),
            ("conditions", _pairs(answer["conditions"])),
            *((f"{row['name']} back end", _backend(row)) for row in answer["backends"]),
            *_self_check(answer),
            ("database", answer["db"]["path"]),
            ("", _db_state(answer["db"])),
            ("variables", _variables(answer["environment"])),
        ]
    )


def _backend(row: Answer) -> str:
    if row["native"]:
        works = ", ".join(row["kernels"]) or "no tile"
        return "; ".join([f"native kernel works: {works}", *row["refused"]])
    return f"mlx paths only: {row['reason']}" if row["device"] else f"not here: {row['reason']}"


def _self_check(answer: Answer) -> list[tuple[str, object]]:
    if answer["self_check"] is None:
        return [("cost", answer["cost"])]
    found = answer["self_check"]
    return [("self-check", found["reason"] if found["ok"] else f"FAILED: {found['reason']}")]


def _db_state(db: Answer) -> str:
    if db["problem"]:
        return str(db["problem"])
    if not db["exists"]:
        return "not there yet: run mla-tune"
    state = f"{counted(db['plans'], 'plan')} for this device"
    if db["other_mlx"]:
        state += f", {db['other_mlx']} of another MLX, OS or driver: run mla-tune verify"
    if db["other_kernel"]:
        state += f", {db['other_kernel']} of another kernel: run mla-tune"
    return state


def _variables(values: Answer) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "none is set"


def checked(answer: Answer) -> Iterator[RenderableType]:
    """The answer of `mla-tune db check`."""
    rows = answer["rows"]
    yield _facts(
        [
            ("database", answer["path"]),
            ("schema", answer["schema"]),
            *((f"{name} rows", count) for name, count in rows.items()),
            ("state", "sound" if answer["ok"] else "; ".join(answer["problems"])),
        ]
    )


def _pairs(values: Answer) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values in two columns; long values wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(str(value)))
    return table


def _table(*columns: str, left: int = 1) -> Table:
    """A light table: the first `left` columns and the last of a text table are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(columns):
        words = index < left or column == "result"
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


# --- progress ----------------------------------------------------------------------------------


class Progress:
    """Notes on stderr while something runs: a changing line on a terminal, else finished ones only.

    Call it with the tuner's events; `note` and `measured` serve the other commands.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._status: Status | None = None
        self._title = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, event: Event) -> None:
        from .tuner import BucketSkipped, BucketStarted, BucketTuned, RunStarted, Waiting

        if isinstance(event, RunStarted):
            self.line(start(event))
        elif isinstance(event, Waiting):
            self.line(event.reason)
        elif isinstance(event, BucketStarted):
            self._title = f"{event.number}/{event.total}  {short(event.bucket)}"
            self.note(self._title)
        elif isinstance(event, BucketTuned):
            row = event.row
            gain = f"{row.plan}, {speedup(row.speedup)}{_beside(row.baseline)}"
            found = f"{row.baseline} is best" if row.stays else gain
            self.line(f"{self._title}: {found} ({duration(event.seconds)})")
        elif not isinstance(
            event, BucketSkipped
        ):  # those are listed at the end, with their reasons
            self.note(f"{self._title}: {_measured(event.measurement)}")

    def measured(self, measurement: Measurement) -> None:
        """One plan of a benchmark is finished; failures stay visible."""
        text = f"{short(measurement.shape)}: {_measured(measurement)}"
        (self.note if measurement.status == "ok" else self.line)(text)

    def note(self, text: str) -> None:
        """What is being done now; replaced by the next note."""
        if self._status:
            self._status.update(Text(text))

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)


def _measured(measurement: Measurement) -> str:
    if measurement.status != "ok":
        return f"{measurement.plan} {measurement.status}: {measurement.message}"
    return f"{measurement.plan} {microseconds(measurement.median_us)}"
