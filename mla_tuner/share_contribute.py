"""What a pull request with a device's table needs: the file, a title and the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import share
from .answers import short
from .errors import ShareError
from .share_format import SharedBucket, SharedDevice, SharedRun, SharedTable
from .store import Store
from .words import counted


@dataclass(frozen=True)
class Contribution:
    """A file that was written, and what to say about it in Markdown."""

    path: Path
    title: str
    text: str


def contribute(store: Store, folder: Path) -> list[Contribution]:
    """Merge the database's tables into those of a folder, a file for each family.

    Raises:
        ShareError: there is nothing to contribute, or a file is not as it must be or can't be
            written.
    """
    made = []
    for mine in share.sound_tables(store):
        path = folder / f"{mine.family}.json"
        before = share.read(path) if path.exists() else None
        after = share.merged(before, mine) if before else mine
        if before != after:  # one that was pulled from there has nothing new
            share.write(after, path)
            made.append(Contribution(path, _title(mine), "\n".join(_text(mine, before, after))))
    if not made:
        raise ShareError(f"{folder} holds all that is in {store.path} already")
    share.write_schema(folder)
    return made


def _title(mine: SharedTable) -> str:
    names = ", ".join(sorted({device.name for device in mine.devices}))
    count = sum(len(device.buckets) for device in mine.devices)
    return f"Tuning table of {names}: {counted(count, 'bucket')}"


def _text(mine: SharedTable, before: SharedTable | None, after: SharedTable) -> Iterator[str]:
    known = {
        (device.versions, each.bucket): each
        for device in (before.devices if before else ())
        for each in device.buckets
    }
    touched = {device.versions for device in mine.devices}
    yield f"`{after.family}.json`: what `mla-tune` measured; its winners follow from the evidence."
    for device in after.devices:
        if device.versions not in touched:
            continue
        yield from ("", f"## {device.name}, `{device.key}`", "")
        yield f"Kernel `{device.kernel}`, MLX {device.mlx}, {device.system}."
        yield from ("", "| run | day | clock | options | software |", "|---|---|---|---|---|")
        yield from (_run(run) for run in device.runs)
        yield from ("", "| bucket | plan | speed-up (95 %) | rounds | runs | before |")
        yield "|---|---|---|---|---|---|"
        yield from _buckets(
            device, {b: each for (v, b), each in known.items() if v == device.versions}
        )
    yield from ("", "`mla-tune share check` finds nothing wrong with it.", "")


def _run(run: SharedRun) -> str:
    options, software = (
        ", ".join(f"{name} {json.dumps(value)}" for name, value in sorted(told.items()))
        for told in (run.options, run.software)
    )
    return f"| `{run.id}` | {run.day} | {run.clock} | {options} | {software} |"


def _buckets(device: SharedDevice, known: dict[object, SharedBucket]) -> Iterator[str]:
    for each in device.buckets:
        before = known.get(each.bucket)
        if before == each:
            continue
        gain = "1"
        if each.speedup_low is not None and each.speedup_high is not None:
            gain = f"{each.speedup:.3g}x {each.baseline} "
            gain += f"({each.speedup_low:.3g} to {each.speedup_high:.3g})"
        then = str(before.plan) if before else "new"
        runs = len(each.evidence)
        yield f"| {short(each.bucket)} | {each.plan} | {gain} | {each.rounds} | {runs} | {then} |"
