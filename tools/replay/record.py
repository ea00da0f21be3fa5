"""Makes a recording on this machine: exhaustive sweeps through the real runners."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from mla_tuner import backends
from mla_tuner import device as devices
from mla_tuner.candidates import candidates
from mla_tuner.conditions import settle
from mla_tuner.live import LiveRunners
from mla_tuner.measure import Runner, chain, chain_length, machine_lock, sample_seconds
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

from .recording import MIN_ROUNDS, Recording, Samples, Sweep, load, save

ROUNDS = 31
A_TURN = 3  # rounds before the next shape's turn: a bad minute falls on all shapes alike
# Times behind the best in every one of the first rounds: no more of those are needed. A plan of two
# threads looks like that for a while when a core is taken.
HOPELESS = 8.0
HOPELESS_ROUNDS = 4
SLACK = 1.3  # a sweep is started only if this many times its estimate is left

# Grid points that are tuned in the replay, and shapes between them that only score it. The likely
# ones first; the longest take seconds a call in plain MLX on a CPU.
GRID = [
    *[Shape(c, 1, 16) for c in (1024, 2048, 4096, 8192, 16384, 32768)],
    *[Shape(c, 1, 16) for c in (1536, 3000, 5000, 12000, 24576)],
    *[Shape(c, 1, 128) for c in (1024, 2048, 4096, 8192)],
    *[Shape(c, 1, 128) for c in (1536, 3000, 5000)],
    *[Shape(c, 2, 16) for c in (1024, 2048, 4096, 8192)],
    *[Shape(c, 4, 16) for c in (1024, 2048, 4096)],
    *[Shape(c, b, 16) for c in (1536, 3000) for b in (2, 3, 4)],
    *[Shape(c, 2, 128) for c in (1024, 2048, 4096)],
    *[Shape(c, b, 128) for c in (1536, 3000) for b in (2, 3)],
    *[Shape(c, 1, 20) for c in (1024, 4096, 16384, 1536, 6000, 12000)],
    Shape(5000, 2, 16),
    Shape(40000, 1, 16),
]
# More for GPUs, up to 2^24 cached tokens x heads: of more MLX's own path takes tens of GB.
GPU_GRID = [
    *GRID,
    *[Shape(c, 1, 16) for c in (65536, 131072, 100000)],
    *[Shape(c, 1, 128) for c in (16384, 32768, 65536, 131072, 12000, 24576, 40000, 100000)],
    *[Shape(c, b, 16) for c in (16384, 65536) for b in (2, 4)],
    *[Shape(c, b, 16) for c in (4096, 16384) for b in (8, 32)],
    *[Shape(c, b, 16) for c in (12000,) for b in (3, 6, 24)],
    *[Shape(c, b, 128) for c in (8192, 16384) for b in (2, 4, 8)],
    *[Shape(c, b, 128) for c in (12000,) for b in (3, 6)],
    *[Shape(c, 1, 20) for c in (65536, 131072, 40000, 100000)],
]


def record(
    out: Path,
    shapes: Sequence[Shape] | None = None,
    *,
    budget_s: float,
    tell: Callable[[str], None],
    force: bool = False,
) -> Recording:
    """Sweep the shapes in turn, a few rounds each, up to `ROUNDS` or the end of the budget.

    The file is written after every turn, so that a run may be cut short and go on later. Holds the
    machine's lock.

    Raises:
        ValueError: the file is of another device, kernel or MLX release, or no recording.
        BusyError: another process is tuning, or others keep the machine busy and nothing forces it.
    """
    device = devices.probe()
    if shapes is None:
        shapes = GRID if device.backend == "cpu" else GPU_GRID
    recording = _resumed(out, device)
    with machine_lock():
        state = settle(device, force=force)
        recording.measured += f"; {len(recording.sweeps)} shapes on, {state}"
        runners = LiveRunners(device)
        deadline = runners.now() + budget_s
        passed_over: set[Shape] = set()
        while todo := [s for s in shapes if s not in passed_over and _unfinished(recording, s)]:
            for shape in todo:
                if runners.now() > deadline:
                    tell("the budget was used up")
                    return recording
                sweep = recording.sweeps.get(shape)
                runner = runners(shape, sweep.rounds if sweep else 0)
                if sweep is None:
                    sweep = open_sweep(runner, shape, exact_candidates(shape, device), deadline)
                if sweep is None:
                    passed_over.add(shape)
                    tell(f"{shape}: passed over, {deadline - runners.now():.0f} s are left")
                    continue
                recording.sweeps[shape] = more_rounds(runner, sweep)
            save(recording, out)
            tell(f"{len(todo)} shapes visited, {deadline - runners.now():.0f} s are left")
    return recording


def _unfinished(recording: Recording, shape: Shape) -> bool:
    return shape not in recording.sweeps or recording.sweeps[shape].rounds < ROUNDS


def exact_candidates(shape: Shape, device: devices.Device) -> list[Plan]:
    """The legal plans of a shape itself, which may lie between buckets."""
    exact = shape.bucket._replace(context=shape.context, batch=shape.batch)
    return candidates(exact, device, backends.get(device.backend))


def open_sweep(
    runner: Runner, shape: Shape, plans: Sequence[Plan], deadline: float
) -> Sweep | None:
    """Proves each plan, then times all of them in the first rounds. None: it would not fit.

    Raises:
        RuntimeError: a plan is wrong here, or another one ran: nothing to record.
    """
    first: dict[Plan, float] = {}
    for plan in plans:
        if runner.now() > deadline:
            return None
        checked = runner.check(plan)
        if not checked.ok:
            raise RuntimeError(f"{plan} is wrong at {shape}: {checked.reason}")
        first[plan] = checked.seconds * 1e6
    if runner.now() + SLACK * _estimate_s(first, runner.queued) > deadline:
        return None
    empty: dict[Plan, Samples] = dict.fromkeys(plans, ())
    return _timed(runner, Sweep(shape, empty, first), plans, HOPELESS_ROUNDS)


def more_rounds(runner: Runner, sweep: Sweep) -> Sweep:
    """Another turn: the plans that were not hopeless in the first rounds.

    Raises:
        RuntimeError: another plan ran than the one asked for.
    """
    least = {
        plan: min(t for t in row[:HOPELESS_ROUNDS] if t is not None)
        for plan, row in sweep.samples.items()
    }
    best = min(least.values())
    live = [plan for plan in sweep.samples if least[plan] < HOPELESS * best]
    return _timed(runner, sweep, live, min(A_TURN, ROUNDS - sweep.rounds))


def _timed(runner: Runner, sweep: Sweep, live: Sequence[Plan], rounds: int) -> Sweep:
    """The sweep with so many shuffled rounds of the live plans more."""
    rng = random.Random(f"{sweep.shape} {sweep.rounds}")
    samples: dict[Plan, list[float | None]] = {p: [*row] for p, row in sweep.samples.items()}
    for _ in range(rounds):
        for row in samples.values():
            row.append(None)
        for plan in rng.sample(live, len(live)):
            known = [us for us in samples[plan] if us is not None]
            if known:
                inner = chain_length(min(known) * 1e-6, runner.queued)
            else:
                inner, _ = chain(runner, plan, sweep.first_us[plan] * 1e-6)
            seconds, ran = runner.sample(plan, inner)
            if ran is None or (ran.path, ran.partitions) != (plan.path, plan.partitions):
                raise RuntimeError(f"asked for {plan} at {sweep.shape}, but {ran} ran")
            samples[plan][-1] = seconds * 1e6
    rows: dict[Plan, Samples] = {plan: tuple(row) for plan, row in samples.items()}
    return Sweep(sweep.shape, rows, sweep.first_us)


def _estimate_s(first_us: dict[Plan, float], queued: bool) -> float:
    least_s, best = sample_seconds(queued), min(first_us.values())
    rounds = {p: ROUNDS if us < HOPELESS * best else HOPELESS_ROUNDS for p, us in first_us.items()}
    return sum(rounds[plan] * max(us * 1e-6, least_s) for plan, us in first_us.items())


def _command() -> str:
    return shlex.join(["python", "-m", "tools.replay", *sys.argv[1:]])


def _resumed(out: Path, device: devices.Device) -> Recording:
    kernel = backends.get(device.backend).digest()
    software = {name: str(version) for name, version in devices.software().items()}
    if not out.exists():
        return Recording(
            device,
            kernel=kernel,
            software=software,
            system=devices.system_version(),
            date=datetime.now(timezone.utc).date().isoformat(),
            command=_command().replace(str(out), out.name),  # recordings are shared: no folders
            measured=f"all candidates in {ROUNDS} shuffled rounds ({MIN_ROUNDS} at least), "
            f"{A_TURN} of each shape in turn, cold caches; those {HOPELESS:g}x behind in the first "
            f"{HOPELESS_ROUNDS} rounds",
        )
    known = load(out)
    then = known.device.key, known.kernel, known.software.get("mlx")
    now = device.key, kernel, software.get("mlx")
    if then != now:
        raise ValueError(f"{out} is a recording of {then}, this is {now}: name another file")
    return known
