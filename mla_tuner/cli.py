"""The `mla-tune` command: every function here parses, calls one function, and prints.

What a command needs is imported when it runs, so that `--help` and `plan` start quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__, share_cli
from . import device as devices
from .console import database as _db
from .console import show as _print
from .device import MLX_VERSION, Device
from .errors import TunerError
from .options import (
    BESIDE_THE_DATABASE,
    GRID_LISTS,
    MISSES_LISTS,
    WRAPPER_ONLY,
    budget_option,
    db_option,
    device_option,
    dtype_name,
    geometry_option,
    grid_options,
    json_option,
    layout_name,
    lengths_option,
    misses_option,
    model_of,
    model_option,
    one_shape,
    option,
    options,
    path_name,
    printable,
    refuse_together,
    refuse_unused,
    refuse_without,
    shapes_of,
    storage_option,
    wrapper_options,
)
from .parse import count, program, several
from .plan import PATHS, Plan
from .shapes import (
    MAX_HEADS,
    MAX_PARTITIONS,
    MAX_Q_LEN,
    Shape,
    effective_batch,
)
from .words import counted

if TYPE_CHECKING:
    from .shapes import Bucket
    from .store import Store
    from .table import Row


class Commands(click.Group):
    """Known failures become one line and exit code 1."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = printable([program(sys.argv[0]), *args])  # to say how a run is continued
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TunerError as error:
            # One line, whatever a database or a server made part of it.
            text = "".join(each if each.isprintable() else " " for each in str(error))
            raise click.ClickException(text) from error
        except KeyboardInterrupt as error:
            text = f"interrupted; finished buckets are stored. To continue: {ctx.obj}"
            raise click.ClickException("interrupted" if ctx.invoked_subcommand else text) from error


# --- commands ----------------------------------------------------------------------------------


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@options(
    device_option,
    budget_option("5m"),
    db_option,
    grid_options("1k,2k,4k,8k,16k,32k", "1,2,4,8", "16,128", 1 << 10),
    click.option("--force", is_flag=True, help="Time even where the machine is not fit for it."),
    *(misses_option, storage_option, json_option),
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context, /, **params: Any) -> None:
    """Measure every way to run MLA decode on this device, and store the fastest for each shape.

    Without a command it tunes: likely shapes first, until the budget is used. The next run goes on
    where this one stopped. --device, --db, --model, --geometry and --json may also stand before a
    command.
    """
    if ctx.invoked_subcommand is None:
        refuse_together(ctx, "from_misses", *MISSES_LISTS)
        _tune(ctx.obj, **params)
    else:
        refuse_unused(ctx)


def _tune(
    again: str,
    device: str | None,
    budget: float,
    db: Path | None,
    as_json: bool | None,
    force: bool,
    from_misses: Path | None,
    storage: str | None,
    **grid: Any,
) -> None:
    from . import answers, report, tuner
    from .store import Store

    if from_misses is None:
        named = grid.pop("model"), grid.pop("heads"), grid.pop("geometry")
        heads, geometry = model_of(*named, (16, 128))
        buckets = tuner.default_buckets(heads=heads, geometry=geometry, **grid)
    else:
        from .integrations.counts import read_misses

        buckets = read_misses(_db(db).parent if from_misses is BESIDE_THE_DATABASE else from_misses)
    here = _device(device)
    _note_missing_kernel(here)
    with Store(_db(db)) as store, report.Progress() as progress:
        tune: Callable[..., tuner.Summary] = tuner.tune
        if storage is not None:
            from . import fleet

            tune = partial(fleet.tune, storage, note=progress.line)
        summary = tune(store, here, buckets, budget_s=budget, progress=progress, force=force)
        rows = _winners(store, here, buckets)
    answer = answers.tune_answer(summary, rows, here, _db(db), again)
    _print(answer, report.tuned(answer), as_json)


@main.command()
@options(device_option, db_option, json_option)
def probe(device: str | None, db: Path | None, as_json: bool | None) -> None:
    """Show the device, the versions, and what works here; and why not what doesn't."""
    from . import report
    from .overview import overview

    answer = overview(_device(device), _db(db))
    _print(answer, report.overviewed(answer), as_json)


@main.command()
@options(
    model_option,
    option("--context", count(0, 1 << 31), "N", "Tokens of the longest sequence."),
    option("--batch", count(1, 1 << 16), "N", "Sequences.  [default: 1]"),
    option("--heads", count(1, MAX_HEADS), "N", "Query heads.  [default: the model's]"),
    option("--dtype", dtype_name, "D", "Or float16, float32.", "bfloat16"),
    option("--q-len", count(1, MAX_Q_LEN), "N", "Query tokens of each sequence.", "1"),
    option("--layout", layout_name, "L", "Cache layout: paged or dense.", "paged"),
    *(lengths_option, geometry_option, device_option, db_option),
    click.option("--explain", is_flag=True, help="Show every step of the look-up, with numbers."),
    json_option,
)
def plan(
    device: str | None, db: Path | None, explain: bool, as_json: bool | None, **params: Any
) -> None:
    """Show what serving would run for one shape, where the choice comes from, and why."""
    from . import answers, report
    from .policy import Policy

    shape = one_shape(**params)
    here = _device(device)
    _note_missing_kernel(here)
    policy = Policy.load(_db(db), here)
    work = (shape.context, effective_batch(shape.all_lengths), shape.heads, shape.dtype)
    cache = (shape.q_len, shape.geometry, shape.layout)
    steps = policy.explain(*work, *cache) if explain else None
    answer = answers.plan_answer(policy.decide(*work, *cache), here, steps)
    _print(answer, report.decision(answer), as_json)


@main.command()
@options(
    budget_option("60s"),
    grid_options("4k,32k", "1", "16", 1),
    lengths_option,
    option(
        *("--paths", several(path_name), "P,P,.."),
        "Paths to time; mlx always is.  [default: all; with --wrapper mlx,single,split]",
    ),
    option("--partitions", several(count(2, MAX_PARTITIONS)), "N,N,..", "Counts for split."),
    click.option("--all", "every", is_flag=True, help="All candidates, not the likely best ones."),
    *(wrapper_options, device_option, json_option),
)
@click.pass_context
def bench(
    ctx: click.Context, /, device: str | None, budget: float, as_json: bool | None, **params: Any
) -> None:
    """Time every path on given shapes, side by side in one process; nothing is stored."""
    from . import bench as benchmark
    from . import report, wrapper_bench

    wrapped, how = params.pop("wrapper"), {name: params.pop(name) for name in WRAPPER_ONLY}
    refuse_together(ctx, "lengths", "contexts", "batches")
    refuse_together(ctx, "grid", *GRID_LISTS, "lengths")
    refuse_without(ctx, "wrapper", *WRAPPER_ONLY)
    if wrapped and params["lengths"]:
        raise click.UsageError("--wrapper takes no ragged batches: leave out --lengths")
    grid = params.pop("grid")
    choice = {name: params.pop(name) for name in ("paths", "partitions", "every")}
    choice["paths"] = choice["paths"] or (wrapper_bench.PATHS if wrapped else PATHS)
    if choice["partitions"] and "split" not in choice["paths"]:
        raise click.UsageError("--partitions counts those of split, which --paths leaves out")
    shapes = shapes_of(**params | (wrapper_bench.GRIDS[grid]._asdict() if grid else {}))
    here = _device(device)
    _note_missing_kernel(here)

    def plans(shape: Shape) -> list[Plan]:
        return benchmark.plans_for(shape, here, **choice)

    if wrapped:
        _bench_wrapper(ctx.obj, shapes, plans, here, budget, params["model"], as_json, **how)
        return
    with report.Progress() as progress:
        measured = progress.measured
        rows = benchmark.bench(shapes, plans, device=here, budget_s=budget, progress=measured)
        answer = list(rows)
    _print(answer, report.benched(answer), as_json)
    _refuse_empty(answer)


def _bench_wrapper(
    command: str,
    shapes: list[Shape],
    plans: Callable[[Shape], list[Plan]],
    here: Device,
    budget: float,
    model: str | None,
    as_json: bool | None,
    trials: int,
    **files: Path | None,
) -> None:
    from . import report, wrapper_bench
    from .wrapper_bench_report import check_files, markdown, write_files
    from .wrapper_bench_widths import widths_of

    check_files(files)
    widths = {heads: widths_of(model, heads) for heads in {shape.heads for shape in shapes}}
    with report.Progress() as progress:
        found = wrapper_bench.run(
            *(shapes, plans, here, widths),
            budget_s=budget,
            trials=trials,
            progress=progress.measured,
        )
    answer = wrapper_bench.report(found, here, widths, trials, command)
    _print(answer, [markdown(answer)], as_json)
    write_files(answer, files)
    _refuse_empty(answer["rows"])


def _refuse_empty(rows: Iterable[Any]) -> None:
    if not any(row["median_us"] for row in rows):
        raise click.ClickException("nothing could be timed: see above, or give a longer --budget")


@main.command()
@options(budget_option("25s"), device_option, db_option, json_option)
def verify(device: str | None, budget: float, db: Path | None, as_json: bool | None) -> None:
    """Check every kernel variant for correctness, then time a sample of stored plans again.

    Exit code 1 when a result is wrong or a stored plan has become slower than mlx.
    """
    from . import answers, report
    from . import verify as verification

    here = _device(device)
    _note_missing_kernel(here)
    with report.Progress() as progress:
        found = verification.verify(here, _db(db), budget, progress.note)
    answer = answers.verify_answer(here, *found)
    _print(answer, report.verified(answer), as_json)
    if not answer["ok"]:
        raise click.ClickException("a result is wrong, or a plan is slower than mlx: see above")


@main.command(
    context_settings={"allow_interspersed_args": False, "allow_extra_args": True},
    options_metavar="[--absorb] [--write-misses] [--] mlx_lm.COMMAND ...",
)
@click.option("--absorb", is_flag=True, help="Let DeepSeek-V2, Youtu and MiniCPM3 cache latents.")
@click.option("--write-misses", is_flag=True, help="At the end, for `mla-tune --from-misses`.")
@click.pass_context
def run(ctx: click.Context, absorb: bool, write_misses: bool) -> None:
    """Run a command of mlx-lm with its decode routed through the tuned plans.

    For instance: mla-tune run -- mlx_lm.server --model ... With MLA_TUNER=log in the environment
    the counts are printed at the end; `off` installs nothing, `force` runs our kernels wherever
    they can.
    """
    from .integrations import run as engine

    if not ctx.args:
        raise click.UsageError("give a command of mlx-lm: mlx_lm.server, mlx_lm.generate, ..")
    engine.run(ctx.args, absorb=absorb, write_misses=write_misses)


def _file(name: str, text: str) -> Any:
    return click.option(name, type=click.Path(dir_okay=False, path_type=Path), help=text)


@main.command("report")
@options(
    _file("--html", "One page with charts, which works offline."),
    _file("--md", "The same as tables in Markdown."),
    _file("--table", "Read this shared table, not the database."),
    click.option(
        *("--device", "key"),
        metavar="KEY",
        help="Device to show.  [default: the only one, or this machine's]",
    ),
    *(db_option, json_option),
)
@click.pass_context
def report_found(
    ctx: click.Context,
    /,
    html: Path | None,
    md: Path | None,
    table: Path | None,
    key: str | None,
    db: Path | None,
    as_json: bool | None,
) -> None:
    """Show what was measured on a device and what came of it, as a page or as Markdown.

    Without --html and --md the Markdown goes to stdout.
    """
    from .html import findings, markdown, output, page
    from .store import Store

    refuse_together(ctx, "table", "db")
    output.apart(table or _db(db), html, md)
    if table:
        found = findings.of_table(table, key)
    else:
        with Store(_db(db), create=False) as store:
            found = findings.of_store(store, key)
    if found.others and key is None:
        others = ", ".join(found.others)
        click.echo(f"this machine's: {found.device.key}; with --device: {others}", err=True)
    wanted = [(html, page.render), (md, markdown.render)]
    files = [output.write(path, render(found)) for path, render in wanted if path]
    text = map(str, files) if files else [markdown.render(found)]
    _print(output.answer(found, files), text, as_json)


@main.group()
@click.pass_context
def db(ctx: click.Context) -> None:
    """Look after the tuning database."""
    refuse_unused(ctx)


@db.command("path")
@options(db_option, json_option)
def db_path(db: Path | None, as_json: bool | None) -> None:
    """Print where the database is."""
    path = str(_db(db))
    _print({"path": path}, [path], as_json)


@db.command("check")
@options(db_option, json_option)
def db_check(db: Path | None, as_json: bool | None) -> None:
    """Look for damage, and count the rows. Exit code 1 when it is damaged."""
    from . import report
    from .store import Store

    with Store(_db(db), create=False) as store:
        answer = store.check()
    _print(answer, report.checked(answer), as_json)
    if not answer["ok"]:
        raise click.ClickException(f"{answer['path']} is damaged")


@db.command("rebuild")
@options(db_option, json_option)
def db_rebuild(db: Path | None, as_json: bool | None) -> None:
    """Derive all winners and thresholds anew from the evidence."""
    from .store import Store

    with Store(_db(db), create=False, upgrade=True) as store:
        plans = store.rebuild()
    text = f"{counted(plans, 'plan')} derived from the evidence in {store.path}"
    _print({"path": str(store.path), "plans": plans}, [text], as_json)


@db.command("freeze")
@options(
    click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File to write.  [default: frozen-<digest>.json beside the database]",
    ),
    *(device_option, db_option, json_option),
)
def db_freeze(device: str | None, out: Path | None, db: Path | None, as_json: bool | None) -> None:
    """Write the plans that count here to a file that serving can require by its digest."""
    from . import frozen
    from .store import Store

    here, path = _device(device), _db(db)
    with Store(path, create=False) as store:
        data, rows = frozen.freeze(store.plans(here.key), here)
    imported = frozen.origins(rows, path, here)
    digest = frozen.digest_of(data)
    out = out or frozen.place(path.parent, digest)
    frozen.write(out, data)
    text = [f"{counted(len(rows), 'plan')} frozen in {out}"]
    text += [
        f"tuned on another {name} (imported): {counted(number, 'bucket')}"
        for name, number in imported.items()
    ]
    text.append(f"to require them: MLA_TUNER_FROZEN={digest}")
    answer = {"path": str(out), "digest": digest, "rows": len(rows), "imported": imported}
    _print(answer, text, as_json)


main.add_command(share_cli.share)


# --- inside ------------------------------------------------------------------------------------


def _device(choice: str | None) -> Device:
    """The chosen device, on which MLX runs from here on."""
    here = devices.probe(choice or "auto")
    devices.use(here)
    return here


def _note_missing_kernel(here: Device) -> None:
    from . import backends

    available, reason = backends.get(here.backend).available()
    if not available and here.backend != "cpu":  # the CPU back end warns by itself
        click.echo(f"{reason}; only the mlx paths run", err=True)


def _winners(store: Store, here: Device, buckets: Iterable[Bucket]) -> list[Row]:
    """Stored winners of these buckets that count for this kernel, MLX release and system."""
    from . import backends

    wanted, kernel = set(buckets), backends.get(here.backend).digest()
    rows = store.tuned(here, kernel, MLX_VERSION, devices.system_version())
    return [row for row in rows if row.bucket in wanted]
