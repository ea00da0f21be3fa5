"""What to run untuned: `split` where a long context leaves the device idle, else `mlx`.

Each gate returns (passed, reason): one sentence serves the decision, the log and the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .candidates import KAPPA, busy, law, row_groups
from .errors import plain
from .plan import MLX, Plan
from .shapes import CONTEXT_GRID, DEEPSEEK, MAX_PARTITIONS, MAX_TUNED_BATCH
from .words import counted

if TYPE_CHECKING:
    from .backends import Backend
    from .device import Device
    from .shapes import Bucket

    Gate = tuple[bool, str]

# Below, fixed limits of others went wrong: 4096 was 3 times slower on an M1 Ultra, which gained
# only from 8K to 16K on. From here vllm-metal measured gains (#619, 20 heads, 2 sequences).
LONG_CONTEXT = 32768
# Beyond 11 to 16 rows the work is bound by arithmetic on M1 to M4, where MLX's matrix products are
# as good as a kernel: reading the cache once, not twice and a half, gains nothing.
FEW_ROWS = 16
# MLX's products fill a GPU by themselves. On a simulated M5 Max with 40 cores (tools/replay,
# 2026-11-29) 64 pieces, which fill 80 %, lose 16 % to them if our kernel runs at 80 % of its count.
MIN_FILL = 0.85
# Those that say nothing about a shape that is tuned.
TUNED = ("one_token", "long_context", "few_rows", "cores_known", "idle", "filled")


class Check(NamedTuple):
    """A gate's name, and what it said."""

    name: str
    passed: bool
    reason: str


def gate(bucket: Bucket, device: Device, backend: Backend, options: str = "") -> tuple[Plan, str]:
    """The plan for a bucket without tuning data, and the sentence that says why. Never raises.

    options: of the command line, that the command which tunes the bucket must have, too.
    """
    return verdict(list(checks(bucket, device, backend)), bucket, device, backend, options)


def verdict(
    asked: list[Check], bucket: Bucket, device: Device, backend: Backend, options: str = ""
) -> tuple[Plan, str]:
    """The plan that follows from what the gates said, and why."""
    name, passed, reason = asked[-1]
    if not passed:
        if name in TUNED and bucket.batch <= MAX_TUNED_BATCH:
            command = f"mla-tune --device {device.backend}{options} {tuning(bucket)}"
            reason += f"; to tune this shape: {command}"
        return MLX, reason
    reasons = {check.name: check.reason for check in asked}
    plan = proposal(bucket, device.cores or 1, backend)
    return plan, f"not tuned here; {reasons['idle']} at context {bucket.context}"


def tuning(bucket: Bucket) -> str:
    """The options by which `mla-tune` tunes a bucket."""
    words = [f"--contexts {bucket.context} --batches {bucket.batch} --heads {bucket.heads}"]
    for option, value, default in (
        ("--dtypes", bucket.dtype, "bfloat16"),
        ("--q-lens", bucket.q_len, 1),
        ("--layouts", bucket.layout, "paged"),
        ("--geometry", bucket.geometry, DEEPSEEK),
    ):
        words += [f"{option} {value}"] if value != default else []
    return " ".join(words)


def checks(bucket: Bucket, device: Device, backend: Backend) -> Iterator[Check]:
    """The gates in order, up to the first that stays shut. The proof may compile and run a
    kernel, so it comes last.
    """
    gates: tuple[tuple[str, Callable[[], Gate]], ...] = (
        ("built", lambda: built(backend)),  # first: without a kernel nothing else matters
        ("on_grid", lambda: on_grid(bucket)),
        ("legal", lambda: legal(bucket)),
        ("one_token", lambda: one_token(bucket)),
        ("long_context", lambda: long_context(bucket)),
        ("few_rows", lambda: few_rows(bucket)),
        ("cores_known", lambda: cores_known(device)),
        ("idle", lambda: idle(tasks_of(bucket, backend), device.cores or 1)),
        ("filled", lambda: filled(bucket, device.cores or 1, backend)),
        ("proven", lambda: proven(bucket, device.cores or 1, backend)),
    )
    for name, ask in gates:
        passed, reason = ask()
        yield Check(name, passed, reason)
        if not passed:
            return


def built(backend: Backend) -> Gate:
    """Whether our kernel can run at all."""
    passed, reason = backend.available()
    return passed, reason or "the native kernel is available"


def on_grid(bucket: Bucket) -> Gate:
    """Whether the context lies where buckets are."""
    if bucket.context > 0:
        return True, f"its bucket is context {bucket.context}"
    return False, f"context is outside {CONTEXT_GRID[0]}..{CONTEXT_GRID[-1]} tokens"


def legal(bucket: Bucket) -> Gate:
    """Any ints and strings may come in; the shape knows which of them mean something."""
    try:
        bucket.shape  # noqa: B018
    except ValueError as error:
        return False, f"no kernel for this shape: {plain(error)}"
    return True, "the shape is known"


def one_token(bucket: Bucket) -> Gate:
    """Whether each sequence decodes one token, which is all that was tried untuned."""
    if bucket.q_len == 1:
        return True, "one query token a sequence"
    return False, f"not tuned here, and it has {bucket.q_len} query tokens a sequence"


def long_context(bucket: Bucket) -> Gate:
    """Whether the scan is long enough to be worth a merge, on any device."""
    if bucket.context >= LONG_CONTEXT:
        return True, f"context {bucket.context} is {LONG_CONTEXT} or more"
    return False, (
        f"not tuned here, nor near it, and context {bucket.context} is below {LONG_CONTEXT}, "
        "from where untuned shapes are split"
    )


def few_rows(bucket: Bucket) -> Gate:
    """Whether the cache's bytes are what takes the time, not arithmetic."""
    if bucket.heads <= FEW_ROWS:
        return True, f"{counted(bucket.heads, 'head')}, no more than {FEW_ROWS}"
    return False, (
        f"not tuned here, and {bucket.heads} heads are more than the {FEW_ROWS} up to which "
        "untuned shapes are split"
    )


def cores_known(device: Device) -> Gate:
    """Whether there is a count to compare the work with."""
    if device.cores is not None:
        return True, f"the device has {counted(device.cores, 'core')}"
    return False, "the device's core count is unknown"


def idle(tasks: int, cores: int) -> Gate:
    """`tasks` = row groups x batch: what one partition gives the device to do."""
    if tasks < cores:
        return True, f"one pass keeps {tasks} of {cores} cores busy"
    whole = f"all {counted(cores, 'core')}"
    return False, f"not tuned here, and one pass keeps {whole} busy"


def filled(bucket: Bucket, cores: int, backend: Backend) -> Gate:
    """Whether as many partitions as a call may have keep enough of the device busy."""
    tasks, count = tasks_of(bucket, backend), proposal(bucket, cores, backend).partitions
    share = busy(bucket.context, count, tasks, cores)
    text = f"{tasks} x {count} pieces keep {cores} cores {share:.0%} busy"
    if share >= MIN_FILL:
        return True, f"{text}, {MIN_FILL:.0%} or more"
    return False, f"not tuned here, and {text}, less than {MIN_FILL:.0%}"


def proven(bucket: Bucket, cores: int, backend: Backend) -> Gate:
    """Whether the kernel that the proposal needs gives right answers on this machine."""
    passed, reason = backend.proof(proposal(bucket, cores, backend), bucket.shape)
    if passed:
        return True, "the kernel's self-check passed here"
    return False, f"the kernel's self-check failed here: {reason}"


def tasks_of(bucket: Bucket, backend: Backend) -> int:
    """Tasks of one partition, with the back end's default tile."""
    return row_groups(bucket.shape.rows, backend.tiles(bucket.shape)[0]) * bucket.batch


def proposal(bucket: Bucket, cores: int, backend: Backend) -> Plan:
    """The split to run if all gates pass: the fewest partitions that keep the device as busy as
    any, of those whose pieces are, by the law, long enough to be worth their merge.
    """
    tile = backend.tiles(bucket.shape)[0]
    tasks = tasks_of(bucket, backend)
    most = max(2, min(MAX_PARTITIONS, int(law(KAPPA, bucket, tile, cores))))
    counts = range(2, most + 1)
    best = max(counts, key=lambda count: busy(bucket.context, count, tasks, cores))
    return Plan("split", best, tile)
