"""Regret: (time(chosen by the policy) - time(best)) / time(best), on shapes that were not tuned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

from mla_tuner.backends import Backend
from mla_tuner.candidates import candidates
from mla_tuner.device import Device
from mla_tuner.evidence import median_interval, percentile
from mla_tuner.plan import MLX, Decision, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import Shape
from mla_tuner.tuner import default_buckets

from .devices import Hardware, SimBackend
from .lab import Score, Tuned, tuned
from .noise import Noise
from .recording import Recording
from .replayed import Played, RecordedBackend, RecordedRunners
from .simulate import SimRunners

MEAN, P95, MOST = 0.02, 0.08, 0.15  # the targets
SLOWER = 1.02  # than mlx, in a simulation's truth; recordings have an interval instead
TUNED_CONTEXTS = tuple(1 << k for k in (10, 11, 12, 13, 14, 15, 17))
HELD_OUT_CONTEXTS = (1400, 1536, 3000, 5000, 12000, 24576, 40000, 100000)
HEADS = (16, 20, 128)


@dataclass(frozen=True)
class Choice:
    """What the policy chose for a shape. `slower`: than `mlx`, beyond noise."""

    shape: Shape
    plan: Plan
    source: str
    best: Plan
    regret: float
    slower: bool


def simulated(hardware: Hardware, noise: Noise, seed: int = 21) -> list[Choice]:
    """Powers of two are tuned; contexts and batches between them are asked for."""
    backend = SimBackend(hardware)
    buckets = default_buckets(TUNED_CONTEXTS, [1, 2, 4, 8], HEADS, ["bfloat16"])
    runners = SimRunners(hardware.seconds, noise, seed=seed, compile_s=hardware.compile_s)
    run = tuned(hardware.device, backend, runners, buckets, seed=seed)
    policy = _policy(hardware.device, run, backend)
    shapes = [Shape(*axes) for axes in product(HELD_OUT_CONTEXTS, (1, 2, 3, 4, 6, 8), HEADS)]
    return [_simulated_choice(hardware, policy, shape, backend) for shape in shapes]


def _simulated_choice(hardware: Hardware, policy: Policy, shape: Shape, backend: Backend) -> Choice:
    exact = shape.bucket._replace(context=shape.context, batch=shape.batch)
    times = {p: hardware.seconds(shape, p) for p in candidates(exact, hardware.device, backend)}
    best = min(times, key=times.__getitem__)
    decision = _decide(policy, shape)
    took = hardware.seconds(shape, decision.plan)
    return Choice(
        *(shape, decision.plan, decision.source, best),
        regret=took / min(times[best], took) - 1,
        slower=took > SLOWER * times[MLX],
    )


def recorded(recording: Recording, seeds: Iterable[int] = (31, 32, 33)) -> list[Choice]:
    """Recorded grid points are tuned from random rounds, the shapes between them asked for."""
    cores = recording.device.cores or 1
    sweeps = {shape: Played(sweep, cores) for shape, sweep in recording.sweeps.items()}
    grid = [shape for shape in sweeps if on_grid(shape)]
    held_out = [shape for shape in sweeps if not on_grid(shape) and _inside(shape, grid)]
    choices = []
    for seed in seeds:
        strict = RecordedBackend(recording, sweeps, strict=True)
        buckets = [shape.bucket for shape in grid]
        run = tuned(recording.device, strict, RecordedRunners(sweeps, seed), buckets, seed=seed)
        between = RecordedBackend(recording, sweeps, strict=False)
        policy = _policy(recording.device, run, between)
        choices += [_recorded_choice(policy, shape, sweeps[shape]) for shape in held_out]
    return choices


def _recorded_choice(policy: Policy, shape: Shape, played: Played) -> Choice:
    """The oracle is the best plan of one half of the rounds, timed in the other half: the least of
    many medians is partly luck, which must not count. Both halves take their turn.
    """
    decision = _decide(policy, shape)
    plan, rounds = decision.plan, range(played.rounds)
    ratios = [played.us(plan, at) / played.us(MLX, at) for at in rounds]
    interval = median_interval(ratios)
    behind = []
    for seen, timed in ((rounds[::2], rounds[1::2]), (rounds[1::2], rounds[::2])):
        behind.append(played.median(plan, timed) / played.median(played.best(seen), timed) - 1)
    return Choice(
        *(shape, plan, decision.source, played.best(rounds)),
        regret=mean(behind),
        slower=plan != MLX and interval is not None and interval[0] > 1,
    )


def on_grid(shape: Shape) -> bool:
    """Whether the replay tunes it: powers of two in context and batch."""
    return all(value & (value - 1) == 0 for value in (shape.context, shape.batch))


def _inside(shape: Shape, grid: Sequence[Shape]) -> bool:
    """Whether tuned contexts lie on both sides: beyond them a policy extrapolates nothing."""
    kind = shape.bucket._replace(context=0)
    contexts = [tuned.context for tuned in grid if tuned.bucket._replace(context=0) == kind]
    return bool(contexts) and min(contexts) <= shape.context <= max(contexts)


def _policy(device: Device, run: Tuned, backend: Backend) -> Policy:
    return Policy(device, run.rows.values(), backend=backend)


def _decide(policy: Policy, shape: Shape) -> Decision:
    return policy.decide(
        *(shape.context, shape.batch, shape.heads, shape.dtype),
        *(shape.q_len, shape.geometry, shape.layout),
    )


def scores(name: str, choices: Sequence[Choice]) -> list[Score]:
    """Mean, 95th percentile and maximum of the regret; how many choices lose to `mlx`."""
    if not choices:
        return [Score(f"regret, {name}", "no held-out shapes", f"<= {MEAN:.0%} on average", False)]
    average, p95, most = _summary(choices)
    return [
        Score(f"regret, {name}: mean", f"{average:.2%}", f"<= {MEAN:.0%}", average <= MEAN),
        Score(f"regret, {name}: p95", f"{p95:.1%}", f"<= {P95:.0%}", p95 <= P95),
        Score(f"regret, {name}: max", f"{most:.1%}", f"<= {MOST:.0%}", most <= MOST),
        _losses(name, choices),
    ]


def told(name: str, choices: Sequence[Choice]) -> list[Score]:
    """The same of a simulated device, whose regret is the model's as much as the policy's."""
    average, p95, most = _summary(choices)
    text = f"{average:.2%}, {p95:.1%}, {most:.1%}"
    return [Score(f"regret, {name}: mean, p95, max", text), _losses(name, choices)]


def _summary(choices: Sequence[Choice]) -> tuple[float, float, float]:
    regrets = [choice.regret for choice in choices]
    return mean(regrets), percentile(regrets, 0.95), max(regrets)


def _losses(name: str, choices: Sequence[Choice]) -> Score:
    slower = sum(choice.slower for choice in choices)
    return Score(f"slower than mlx, {name}", f"{slower} of {len(choices)}", "0", slower == 0)
