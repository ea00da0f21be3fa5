"""The commands below `mla-tune share`."""

from __future__ import annotations

from pathlib import Path

import click

from .console import database, show
from .options import db_option, json_option, options, refuse_unused
from .server import cli as server_cli
from .words import counted


@click.group()
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


_table = click.Path(dir_okay=False, path_type=Path)


@share.command("export")
@options(_folder_option, db_option, json_option)
def share_export(folder: Path, db: Path | None, as_json: bool | None) -> None:
    """Write <family>.json for each family in the database, with its provenance."""
    from . import share as tables
    from .store import Store

    with Store(database(db), create=False) as store:
        paths = [str(path) for path in tables.export(store, folder)]
    show({"files": paths}, paths, as_json)


@share.command("import")
@click.argument("file", type=_table, required=False)
@options(
    click.option("--undo", metavar="RUN", help="Take an imported run out again."),
    *(db_option, json_option),
)
def share_import(
    file: Path | None, undo: str | None, db: Path | None, as_json: bool | None
) -> None:
    """Add a table's runs to the database; only those of the kernel that is installed here."""
    from . import share as tables
    from .store import Store

    if (file is None) == (undo is None):
        raise click.UsageError("give a table to import, or --undo with a run")
    if undo is not None:
        with Store(database(db), create=False) as store:
            count = tables.undo(store, undo)
        text = f"run {undo} is taken out: it had {counted(count, 'bucket')}"
        show({"run": undo, "buckets": count}, [text], as_json)
        return
    assert file is not None
    table = tables.read(file)
    with Store(database(db)) as store:
        answer = tables.into_store(table, store, file.name)
    lines = [f"{counted(answer['buckets'], 'bucket')} added, {answer['known']} known already"]
    lines += [f"to undo: mla-tune share import --undo {run}" for run in answer["ids"]]
    show(answer, lines, as_json)


@share.command("merge")
@click.argument("out", type=_table)
@click.argument("sources", type=_table, nargs=-1, required=True)
@options(json_option)
def share_merge(out: Path, sources: tuple[Path, ...], as_json: bool | None) -> None:
    """Pool the evidence of several tables of a family, or of several databases, in a new file."""
    from . import share_databases as databases

    if databases.is_one(sources[0]):
        answer = databases.merge(out, sources)
        text = counted(answer["measurements"], "measurement")
    else:
        from . import share as tables

        answer = tables.merge(out, sources)
        text = counted(answer["buckets"], "bucket")
    text += f" of {counted(answer['runs'], 'run')}"
    show({"file": str(out), **answer}, [f"{out}: {text}"], as_json)


@share.command("diff")
@click.argument("a", type=_table)
@click.argument("b", type=_table)
@options(json_option)
def share_diff(a: Path, b: Path, as_json: bool | None) -> None:
    """Show which buckets two tables differ in, with the winners of both."""
    from . import share as tables

    found = tables.differences(tables.read(a), tables.read(b))
    show(found, tables.described(found, (str(a), str(b))), as_json)


@share.command("contribute")
@options(_folder_option, db_option, json_option)
def share_contribute(folder: Path, db: Path | None, as_json: bool | None) -> None:
    """Merge this device's evidence into a folder's tables; print the text of a pull request."""
    from .share_contribute import contribute
    from .store import Store

    with Store(database(db), create=False) as store:
        made = contribute(store, folder)
    answer = [{"file": str(m.path), "title": m.title, "text": m.text} for m in made]
    if as_json:
        show(answer, (), as_json)
        return
    for each in made:
        click.echo(f"{each.path}\n\n{each.title}\n\n{each.text}")


@share.command("check")
@options(_folder_option, json_option)
def share_check(folder: Path, as_json: bool | None) -> None:
    """Validate all shared tables of a folder. Exit code 1 where one can't be relied on."""
    from . import share as tables

    if not folder.is_dir():
        raise click.ClickException(f"no folder {folder}")
    files = sorted(set(folder.glob("*.json")) - {folder / tables.SCHEMA_NAME})
    found = [fault for path in files for fault in tables.check(path)]
    answer = {"files": [str(path) for path in files], "faults": found}
    show(answer, found or [f"{len(files)} checked, nothing is wrong"], as_json)
    if found:
        raise click.ClickException("a table can't be relied on: see above")


for _command in (server_cli.serve, server_cli.pull, server_cli.push):
    share.add_command(_command)
