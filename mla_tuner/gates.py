"""What to run untuned: `split` where a long context leaves the device idle, else `mlx`.

Each gate returns (passed, reason): one sentence serves the decision, the log and the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .candidates import row_groups
from .plan import MLX, Plan
from .shapes import CONTEXT_GRID

if TYPE_CHECKING:
    from .backends import Backend
    from .device import Device
    from .shapes import Bucket

    Gate = tuple[bool, str]

LONG_CONTEXT = 32768
MIN_PARTITIONS = 2
MAX_GATE_PARTITIONS = 8


def gate(bucket: Bucket, device: Device, backend: Backend) -> tuple[Plan, str]:
    """The plan for a bucket without tuning data, and the sentence that says why. Never raises.

    The back end's self-check may run a kernel, so it is asked last.
    """
    for passed, reason in (
        built(backend),  # first: without a kernel nothing else matters
        on_grid(bucket),
        legal(bucket),
        one_token(bucket),
        long_context(bucket),
        cores_known(device),
    ):
        if not passed:
            return MLX, reason
    cores = device.cores or 0
    tile = backend.tiles(bucket.shape.rows)[0]
    tasks = row_groups(bucket.shape.rows, tile) * bucket.batch
    passed, idle_reason = idle(tasks, cores)
    if not passed:
        return MLX, idle_reason
    passed, reason = backend.self_check()
    if not passed:
        return MLX, f"the kernel's self-check failed here: {reason}"
    plan = Plan("split", partitions(tasks, cores), tile)
    return plan, f"not tuned here; {idle_reason} at context {bucket.context}"


def on_grid(bucket: Bucket) -> Gate:
    """Whether the context lies where buckets are."""
    passed = bucket.context > 0
    return passed, f"context is outside {CONTEXT_GRID[0]}..{CONTEXT_GRID[-1]} tokens"


def legal(bucket: Bucket) -> Gate:
    """Any ints and strings may come in; the shape knows which of them mean something."""
    try:
        bucket.shape  # noqa: B018
    except ValueError as error:
        return False, f"no kernel for this shape: {error}"
    return True, "the shape is known"


def one_token(bucket: Bucket) -> Gate:
    """Whether each sequence decodes one token, which is all that was tried untuned."""
    return bucket.q_len == 1, f"{bucket.q_len} query tokens a sequence: tune them before use"


def long_context(bucket: Bucket) -> Gate:
    """Whether the scan is long enough to be worth a merge."""
    passed = bucket.context >= LONG_CONTEXT
    return passed, (
        f"not tuned here, and context {bucket.context} is below {LONG_CONTEXT}, "
        "from where untuned shapes are split: run `mla-tune`"
    )


def cores_known(device: Device) -> Gate:
    """Whether there is a count to compare the work with."""
    return device.cores is not None, "the device's core count is unknown"


def built(backend: Backend) -> Gate:
    """Whether our kernel can run at all."""
    passed, reason = backend.available()
    return passed, reason or "the native kernel is available"


def idle(tasks: int, cores: int) -> Gate:
    """`tasks` = row groups x batch: what one partition gives the device to do."""
    if tasks < cores:
        return True, f"one pass keeps {tasks} of {cores} cores busy"
    return False, f"not tuned here, and one pass keeps all {cores} cores busy: run `mla-tune`"


def partitions(tasks: int, cores: int) -> int:
    """Two tasks a core, within 2..8."""
    return max(MIN_PARTITIONS, min(-(-2 * cores // tasks), MAX_GATE_PARTITIONS))
