"""The `mla-tune` command: every function here parses, calls one function, and prints.

What a command needs is imported when it runs, so that `--help` and `plan` start quickly.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from . import device as devices
from .device import MLX_VERSION, Device
from .errors import StoreError, TunerError
from .options import (
    budget_option,
    db_option,
    device_option,
    dtype_name,
    geometry_option,
    grid_options,
    json_option,
    layout_name,
    lengths_option,
    model_option,
    option,
    options,
    path_name,
    refuse_together,
    refuse_unused,
)
from .parse import count, program, several
from .plan import PATHS
from .shapes import (
    DEEPSEEK,
    MAX_HEADS,
    MAX_PARTITIONS,
    MAX_Q_LEN,
    Geometry,
    Shape,
    effective_batch,
)

if TYPE_CHECKING:
    from .shapes import Bucket
    from .store import Store
    from .table import Row


class Commands(click.Group):
    """Known failures become one line and exit code 1."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = shlex.join([program(sys.argv[0]), *args])  # to say how a run is continued
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TunerError as error:
            raise click.ClickException(str(error)) from error
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
    json_option,
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
    **grid: Any,
) -> None:
    from . import answers, report, tuner
    from .store import Store

    heads, geometry = _model(grid.pop("model"), grid.pop("heads"), grid.pop("geometry"), (16, 128))
    here = _device(device)
    _note_missing_kernel(here)
    buckets = tuner.default_buckets(heads=heads, geometry=geometry, **grid)
    with Store(_db(db)) as store, report.Progress() as progress:
        summary = tuner.tune(store, here, buckets, budget_s=budget, progress=progress, force=force)
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

    shape = _one_shape(**params)
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
        "--paths", several(path_name), "P,P,..", "Paths to time; mlx always is.", ",".join(PATHS)
    ),
    option("--partitions", several(count(2, MAX_PARTITIONS)), "N,N,..", "Counts for split."),
    click.option("--all", "every", is_flag=True, help="All candidates, not the likely best ones."),
    *(device_option, json_option),
)
@click.pass_context
def bench(
    ctx: click.Context, /, device: str | None, budget: float, as_json: bool | None, **params: Any
) -> None:
    """Time every path on given shapes, side by side in one process; nothing is stored."""
    from . import bench as benchmark
    from . import report

    refuse_together(ctx, "lengths", "contexts", "batches")
    choice = {name: params.pop(name) for name in ("paths", "partitions", "every")}
    if choice["partitions"] and "split" not in choice["paths"]:
        raise click.UsageError("--partitions counts those of split, which --paths leaves out")
    shapes = _shapes(**params)
    here = _device(device)
    _note_missing_kernel(here)
    with report.Progress() as progress:
        rows = benchmark.bench(
            shapes,
            lambda shape: benchmark.plans_for(shape, here, **choice),
            device=here,
            budget_s=budget,
            progress=progress.measured,
        )
        answer = list(rows)
    _print(answer, report.benched(answer), as_json)
    if not any(row["median_us"] for row in answer):
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
        answer = {"path": str(store.path), "plans": store.rebuild()}
    text = f"{answer['plans']} plans derived from the evidence in {answer['path']}"
    _print(answer, [text], as_json)


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
    digest = frozen.digest_of(data)
    out = out or frozen.place(path.parent, digest)
    frozen.write(out, data)
    text = [f"{rows} plans frozen in {out}", f"to require them: MLA_TUNER_FROZEN={digest}"]
    _print({"path": str(out), "digest": digest, "rows": rows}, text, as_json)


@main.group()
@click.pass_context
def share(ctx: click.Context) -> None:
    """Tables that all devices of a chip family can use."""
    refuse_unused(ctx)


_folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tuning_db"),
    show_default=True,
    help="Folder of the tables.",
)


@share.command("export")
@options(_folder_option, db_option, json_option)
def share_export(folder: Path, db: Path | None, as_json: bool | None) -> None:
    """Write <family>.json for each family in the database, with its provenance."""
    from . import share as tables
    from .store import Store

    with Store(_db(db), create=False) as store:
        paths = [str(path) for path in tables.export(store, folder)]
    _print({"files": paths}, paths, as_json)


@share.command("check")
@options(_folder_option, json_option)
def share_check(folder: Path, as_json: bool | None) -> None:
    """Validate all shared tables of a folder. Exit code 1 where one can't be relied on."""
    from . import share as tables

    files = sorted(set(folder.glob("*.json")) - {folder / tables.SCHEMA_NAME})
    found = [fault for path in files for fault in tables.check(path)]
    answer = {"files": [str(path) for path in files], "faults": found}
    _print(answer, found or [f"{len(files)} checked, nothing is wrong"], as_json)
    if found:
        raise click.ClickException("a table can't be relied on: see above")


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


def _db(path: Path | None) -> Path:
    from .table import default_path

    try:
        return path.expanduser() if path else default_path()
    except RuntimeError as error:
        raise StoreError(f"cannot use the database {path}: {error}") from error


def _winners(store: Store, here: Device, buckets: Iterable[Bucket]) -> list[Row]:
    """Stored winners of these buckets that count for this kernel, MLX release and system."""
    from . import backends

    wanted, kernel = set(buckets), backends.get(here.backend).digest()
    rows = store.tuned(here, kernel, MLX_VERSION, devices.system_version())
    return [row for row in rows if row.bucket in wanted]


def _model(
    model: str | None,
    heads: tuple[int, ...] | None,
    geometry: Geometry | None,
    default_heads: tuple[int, ...],
) -> tuple[tuple[int, ...], Geometry]:
    """Heads and geometry: as given, else the model's, else the defaults."""
    if model is None:
        return heads or default_heads, geometry or DEEPSEEK
    from .models import resolve

    found = resolve(model)
    return heads or (found.heads,), geometry or found.geometry


def _one_shape(
    context: int | None,
    batch: int | None,
    lengths: tuple[int, ...] | None,
    model: str | None,
    heads: int | None,
    geometry: Geometry | None,
    **rest: Any,
) -> Shape:
    """The shape that `plan` is asked about. Wrong combinations are usage errors."""
    all_heads, of_model = _model(model, (heads,) if heads else None, geometry, ())
    if not all_heads:
        raise click.UsageError("give --heads, or a --model that has them")
    if lengths is None and context is None:
        raise click.UsageError("give --context, or --lengths for a ragged batch")
    try:
        return Shape(
            context=max(lengths or ()) if context is None else context,
            batch=batch or len(lengths or (context,)),
            heads=all_heads[0],
            geometry=of_model,
            lengths=lengths or (),
            **rest,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _shapes(
    model: str | None,
    heads: tuple[int, ...] | None,
    geometry: Geometry | None,
    lengths: tuple[int, ...] | None,
    **lists: Any,
) -> list[Shape]:
    """Every combination of the lists that `bench` was given."""
    all_heads, of_model = _model(model, heads, geometry, (16,))
    if lengths and not any(lengths):
        raise click.UsageError("give at least one length above 0")
    if lengths:
        lists |= {"contexts": (max(lengths),), "batches": (len(lengths),)}
    names = ("layouts", "q_lens", "dtypes", "batches", "contexts")
    return [
        Shape(context, batch, each, dtype, of_model, q_len, layout, lengths or ())
        for each in all_heads
        for layout, q_len, dtype, batch, context in product(*(lists[name] for name in names))
    ]


def _print(answer: object, text: Iterable[Any], as_json: bool | None) -> None:
    """The result on stdout, as JSON or as what `report` can show."""
    if as_json:
        from .answers import finite

        click.echo(json.dumps(finite(answer), indent=2, allow_nan=False))
    else:
        from . import report

        report.show(text)
