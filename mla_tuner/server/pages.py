"""What the server adds to Datasette: pages of devices and buckets, whole tables, and the push.

A plugin: Datasette finds the hooks at the end by their names.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from datasette import NotFound, PayloadTooLarge, Response, hookimpl
from datasette.permissions import Action
from datasette.resources import DatabaseResource
from datasette.tokens import TokenHandler, TokenInvalid

from .. import share
from ..answers import short
from ..errors import ShareError
from ..evidence import median_interval
from ..share_format import SharedBucket, SharedDevice, SharedEntry, SharedTable
from ..table import BUCKET_COLUMNS
from ..words import counted
from . import archive
from .charts import COLOURS, Point, curves, forest
from .client import PLACE
from .config import NAME
from .reading import Reading

PUSH = "push-tables"  # the permission that a token needs
_READ_ONLY = "this server only reads: to take tables it has to be started with --writable"
_VERSIONS = ("key", "kernel", "mlx", "system")


class _Tables:
    """What one server gives away; who waits for a refresh that is under way shares the next one."""

    def __init__(self) -> None:
        self._reading = Reading()
        self._begun = 0
        self._lock = asyncio.Lock()

    async def now(self, datasette: Any) -> Reading:
        """With all that was in the file when they were asked for."""
        asked = self._begun
        async with self._lock:
            if self._begun == asked:
                self._begun += 1
                await datasette.get_database(NAME).execute_fn(self._reading.refresh)
        return self._reading


_tables: WeakKeyDictionary[Any, _Tables] = WeakKeyDictionary()  # by server


async def _read(datasette: Any, request: Any) -> Reading:
    """The tables, for whoever may see the rows that they are made of."""
    resource = DatabaseResource(NAME)
    await datasette.ensure_permission(
        action="view-database", resource=resource, actor=request.actor
    )
    return await _tables.setdefault(datasette, _Tables()).now(datasette)


# --- tables and the push -----------------------------------------------------------------------


async def table(datasette: Any, request: Any) -> Any:
    """A family's table, as `mla-tune share pull` wants it; ?kernel= leaves other kernels out."""
    family, kernel = request.url_vars["family"], request.args.get("kernel") or ""
    reading = await _read(datasette, request)
    text = await asyncio.to_thread(reading.text, family, kernel)
    if text is not None:
        return Response(text, content_type="application/json; charset=utf-8")
    known = reading.tables.get(family)
    if known is None:
        return Response.error(f"there is nothing of {family} here", 404)
    kernels = ", ".join(sorted({device.kernel for device in known.devices}))
    return Response.error(f"{family} was measured with the kernels {kernels} only", 404)


def _loaded(body: bytes) -> SharedTable:
    try:
        return share.load(body.decode("utf-8"), "the table")
    except UnicodeDecodeError as error:
        raise ShareError("the table: not UTF-8 text") from error


def _writable(datasette: Any) -> bool:
    return bool(datasette.setting("allow_signed_tokens"))


class _NoTokens(TokenHandler):  # type: ignore[misc]
    """Of a server that only reads: Datasette's own would say that tokens are not enabled."""

    name = "none"

    async def verify_token(self, datasette: Any, token: str) -> None:
        if token.startswith("dstok_"):  # others are a proxy's, or another plugin's
            raise TokenInvalid(_READ_ONLY)


async def push(datasette: Any, request: Any) -> Any:
    """Add a table, all or nothing. With a token alone: there is no other way in."""
    if request.method != "POST":
        return Response.error("tables are pushed with POST", 405)
    if not _writable(datasette):
        return Response.error(_READ_ONLY, 403)
    if not await datasette.allowed(action=PUSH, actor=request.actor):
        return Response.error("pushing takes a token of this server that allows it", 403)
    try:
        found = await asyncio.to_thread(_loaded, await request.post_body())
    except PayloadTooLarge as error:
        return Response.error(str(error), 413)
    except ShareError as error:
        return Response.error(str(error), 400)

    def add(db: sqlite3.Connection) -> dict[str, int]:
        return archive.add(db, found, str(request.actor["id"]))

    try:
        added = await datasette.get_database(NAME).execute_write_fn(add, request=request)
    except sqlite3.OperationalError as error:  # locked by another program, or the disk is full
        return Response.error(f"the shared file can't be written: {error}", 503)
    return Response.json({"ok": True, **added})


# --- pages -------------------------------------------------------------------------------------


async def devices(datasette: Any, request: Any) -> Any:
    """All devices, as a page or as JSON."""
    reading = await _read(datasette, request)
    found = [
        {**_device(datasette, device), "family": family, **_counts(device)}
        for family, table in sorted(reading.tables.items())
        for device in table.devices
    ]
    if request.path.endswith(".json"):
        return Response.json({"ok": True, "devices": found})
    more = {
        "families": sorted(reading.tables),
        "left_out": _left_out(reading.left_out),
        "database": NAME,
        "writable": _writable(datasette),
    }
    return await _page(datasette, request, "tuning_devices.html", devices=found, **more)


async def device(datasette: Any, request: Any) -> Any:
    """One device with one kernel, MLX and system: what wins in each bucket, and by how much."""
    reading = await _read(datasette, request)
    found = _found(reading, request)
    lines = list(_lines(found).items())
    return await _page(
        *(datasette, request, "tuning_device.html"),
        device=_device(datasette, found),
        charts=[
            curves(dict(lines[at : at + COLOURS]), f"Speed-up over MLX on {found.key}")
            for at in range(0, len(lines), COLOURS)
        ],
        buckets=[_bucket(datasette, found, bucket) for bucket in found.buckets],
    )


async def bucket(datasette: Any, request: Any) -> Any:
    """One bucket of one device: what each run found there."""
    reading = await _read(datasette, request)
    found = _found(reading, request)
    wanted = [request.args.get(name) for name in BUCKET_COLUMNS]
    same = [each for each in found.buckets if [str(v) for v in each.bucket] == wanted]
    if not same:
        raise NotFound(f"{found.key} has no such bucket")
    (this,) = same
    rows = [_entry(entry) for entry in this.evidence]
    return await _page(
        *(datasette, request, "tuning_bucket.html"),
        device=_device(datasette, found),
        bucket=_bucket(datasette, found, this),
        chart=forest(list(_forest(this)), f"Speed-up over MLX of each run, {short(this.bucket)}"),
        evidence=rows,
        database=NAME,
    )


async def _page(datasette: Any, request: Any, template: str, **values: Any) -> Any:
    return Response.html(await datasette.render_template(template, values, request=request))


def _found(reading: Reading, request: Any) -> SharedDevice:
    wanted = tuple(request.args.get(name) for name in _VERSIONS)
    for table in reading.tables.values():
        for device in table.devices:
            if device.versions == wanted:
                return device
    raise NotFound("there is no such device here")


# --- values of the pages -----------------------------------------------------------------------


def _device(datasette: Any, device: SharedDevice) -> dict[str, Any]:
    return {**device.facts, "url": _url(datasette, "device", device)}


def _counts(device: SharedDevice) -> dict[str, Any]:
    return {
        "buckets": len(device.buckets),
        "faster": sum(bucket.path != bucket.baseline for bucket in device.buckets),
        "runs": len(device.runs),
        "last_day": max(bucket.day for bucket in device.buckets),
    }


def _left_out(lines: list[str]) -> str:
    """How many rows are in no table, and why the first of them is not; "" without any."""
    return f"Left out, {counted(len(lines), 'row')} of evidence: {lines[0]}" if lines else ""


def _bucket(datasette: Any, device: SharedDevice, bucket: SharedBucket) -> dict[str, Any]:
    return {
        "url": _url(datasette, "bucket", device, **bucket.bucket._asdict()),
        "text": short(bucket.bucket),
        "plan": str(bucket.plan),
        "baseline": bucket.baseline,
        "speedup": f"{bucket.speedup:.3g}x",
        "interval": _interval(bucket.speedup_low, bucket.speedup_high),
        "runs": len(bucket.evidence),
        "day": bucket.day,
    }


def _entry(shared: SharedEntry) -> dict[str, Any]:
    point = _point(shared)
    return {
        "run": shared.run,
        "day": shared.day,
        "plan": str(shared.entry.plan),
        "speedup": shared.failed or (f"{point.speedup:.3g}x" if point else "-"),
        "interval": _interval(point.low, point.high) if point else "",
        "rounds": len(shared.samples_us or shared.baseline_samples_us),
        "max_error": "" if shared.max_error is None else f"{shared.max_error:.2g}",
    }


def _lines(device: SharedDevice) -> dict[str, list[Point]]:
    """Winners by all that buckets have but the context, in order."""
    found: dict[str, list[Point]] = {}
    for bucket in sorted(device.buckets, key=lambda each: (*each.bucket[1:], each.context)):
        kind = short(bucket.bucket).partition(" ")[2]
        span = bucket.speedup_low, bucket.speedup_high
        found.setdefault(kind, []).append(Point(bucket.context, bucket.speedup, *span))
    return found


def _forest(bucket: SharedBucket) -> Iterator[tuple[str, Point]]:
    for shared in bucket.evidence:
        point = _point(shared)
        if point:
            yield f"{shared.day} {shared.run[:8]} {shared.entry.plan}", point
    span = bucket.speedup_low, bucket.speedup_high
    yield f"together: {bucket.plan}", Point(bucket.context, bucket.speedup, *span)


def _point(shared: SharedEntry) -> Point | None:
    """What an entry says by itself; None where its plan was not timed."""
    ratios = sorted(shared.entry.ratios)
    if not ratios:
        return None
    low, high = median_interval(ratios) or (None, None)
    return Point(0, ratios[len(ratios) // 2], low, high)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{low:.3g}, {high:.3g}]"


def _url(datasette: Any, page: str, device: SharedDevice, **more: object) -> str:
    query = dict(zip(_VERSIONS, device.versions, strict=True)) | more
    return str(datasette.urls.path(f"{PLACE}/{page}?{urlencode(query)}"))


# --- hooks -------------------------------------------------------------------------------------


def register_actions() -> list[Any]:
    """The permission that pushing takes; tokens can be restricted to it."""
    return [Action(name=PUSH, description="Add tables of a chip family")]


def register_token_handler(datasette: Any) -> list[TokenHandler]:
    """Asked before Datasette's own, which was registered earlier."""
    return [] if _writable(datasette) else [_NoTokens()]


def register_routes() -> list[tuple[str, Any]]:
    """Addresses and what answers there."""
    return [
        (rf"^{PLACE}(?:\.json)?$", devices),
        (rf"^{PLACE}/device$", device),
        (rf"^{PLACE}/bucket$", bucket),
        (rf"^{PLACE}/tables/(?P<family>[^/]+)\.json$", table),
        (rf"^{PLACE}/push$", push),
    ]


def menu_links(datasette: Any) -> list[dict[str, str]]:
    """The way here from Datasette's own pages."""
    return [{"href": datasette.urls.path(PLACE), "label": "Tuning tables"}]


for _hook in (register_actions, register_token_handler, register_routes, menu_links):
    hookimpl(_hook)
