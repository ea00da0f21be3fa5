from __future__ import annotations

import random
from itertools import pairwise

import pytest

from mla_tuner.candidates import MIN_GAIN, candidates, law
from mla_tuner.fits import (
    Speedups,
    Threshold,
    Tuned,
    between,
    for_batch,
    path_between,
    share_of,
    speedups_between,
    threshold,
    threshold_of,
)
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import CONTEXT_GRID, MAX_PARTITIONS, Bucket, Shape, bucket_of
from tools.replay.devices import Hardware, SimBackend, cpu, h200

SINGLE = Plan("single", 1, "r16")
ROWS = Plan("mlx_rows")


def split(partitions: int) -> Plan:
    return Plan("split", partitions, "r16")


def bucket(context: int, batch: int = 1) -> Bucket:
    return bucket_of(context, batch, 16, "bfloat16")


def tuned(
    context: int, plan: Plan, single: float | None = None, split: float | None = None
) -> Tuned:
    return Tuned(bucket(context), plan, Speedups(single, split))


def plan_at(context: int, lower: Tuned, upper: Tuned, cores: int | None = 2) -> Plan:
    return between(bucket(context)._replace(context=context), lower, upper, cores)


# --- thresholds and the law --------------------------------------------------------------------


def test_thresholds_are_where_wins_begin_to_hold() -> None:
    winners = {1024: MLX, 2048: SINGLE, 4096: MLX, 8192: SINGLE, 16384: split(4), 32768: split(4)}
    found = threshold({bucket(c): plan for c, plan in winners.items()}, 2)
    assert (found.native_from, found.split_from) == (8192, 16384)
    assert found.kappa is not None


def test_without_wins_there_is_no_threshold() -> None:
    assert threshold({}, 2) == Threshold(None, None, None)
    assert threshold({bucket(1024): MLX}, 2) == Threshold(None, None, None)
    assert threshold({bucket(1024): split(2), bucket(4096): MLX}, 2).split_from is None
    assert threshold({bucket(1024): SINGLE}, None) == Threshold(1024, None, None)


def test_thresholds_are_interpolated_crossings() -> None:
    """Speed-ups 1 at 4096 and 4 at 16384 are context / 4096: 1.02 is crossed at 4178."""
    winners = {bucket(4096): MLX, bucket(16384): split(4)}
    known = {bucket(4096): (0.5, 1.0), bucket(16384): (1.0, 4.0)}
    found = threshold(winners, 2, known)
    assert found.native_from == found.split_from == 4178
    known[bucket(4096)] = (0.5, 0.25)  # context^2: the crossing moves to 1.02^(1/2) * 8192
    assert threshold(winners, 2, known).split_from == 8274
    assert threshold(winners, 2, {bucket(4096): (0.5, None)}).split_from == 16384


def test_a_bucket_that_kept_mlx_has_no_gain_to_show() -> None:
    """A search that found 1.5 where the duel kept mlx moves no threshold below that context."""
    winners = {bucket(4096): MLX, bucket(16384): split(4)}
    found = threshold(winners, 2, {bucket(4096): (1.2, 1.5), bucket(16384): (1.0, 4.0)})
    assert found.split_from == 4178


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_and_plans_agree(seed: int) -> None:
    """Between two tuned contexts the plan changes where the threshold says."""
    rng = random.Random(seed)
    lower = tuned(4096, rng.choice([MLX, SINGLE]), *(rng.uniform(0.3, 1.5) for _ in range(2)))
    upper = tuned(65536, split(4), *(rng.uniform(1.1, 3) for _ in range(2)))
    found = threshold_of([lower, upper], 2)
    assert found.split_from is not None
    for context in range(4097, 65536, 997):
        is_split = path_between(share_of(context, lower, upper), lower, upper) == "split"
        assert is_split == (context >= found.split_from)


def test_the_constant_gives_the_winners_back() -> None:
    winners = {bucket(c): split(p) for c, p in ((4096, 2), (16384, 4), (65536, 8))}
    kappa = threshold(winners, 8).kappa
    assert kappa is not None
    for one, plan in winners.items():
        assert law(kappa, one, "r16", 8) == pytest.approx(plan.partitions)
    wider = bucket_of(4096, 1, 32, "bfloat16")  # twice the row groups: half the partitions
    assert law(kappa, wider, "r16", 8) == pytest.approx(1.0)


# --- between two tuned contexts ----------------------------------------------------------------


def test_between_hits_both_ends_and_stays_inside() -> None:
    low, high = tuned(1024, split(2)), tuned(65536, split(16))
    assert plan_at(1024, low, high) == split(2)
    assert plan_at(65536, low, high) == split(16)
    counts = [plan_at(n, low, high).partitions for n in (1536, 2048, 4096, 8192, 24576, 49152)]
    assert counts == sorted(counts)
    assert 2 <= counts[0] <= counts[-1] <= 16


def test_between_takes_the_tile_of_the_nearer_end() -> None:
    low, high = tuned(1024, Plan("single", 1, "r16")), tuned(65536, Plan("single", 1, "r32"))
    assert plan_at(2048, low, high) == Plan("single", 1, "r16")
    assert plan_at(32768, low, high) == Plan("single", 1, "r32")
    assert plan_at(4096, tuned(1024, MLX), tuned(8192, MLX)) == MLX
    assert plan_at(4096, tuned(1024, ROWS), tuned(8192, ROWS)) == ROWS
    # Only one end knows a tile of the path that is taken.
    low, high = tuned(4096, SINGLE, 1.5, 1.2), tuned(65536, Plan("split", 4, "r32"), 1.5, 3.0)
    assert plan_at(6144, low, high) == SINGLE
    assert plan_at(32768, low, high).tile == "r32"


@pytest.mark.parametrize(
    ("lower", "upper", "path"),
    [
        (tuned(4096, MLX, 0.5, 0.9), tuned(65536, split(4), 1.0, 3.0), "split"),
        (tuned(4096, MLX, 0.5, 0.1), tuned(65536, split(4), 1.0, 1.5), "mlx"),
        (tuned(4096, MLX, 0.9, 0.9), tuned(65536, SINGLE, 1.6, 1.1), "single"),
        (tuned(4096, MLX, 0.5, 0.9), tuned(65536, SINGLE, 1.2, 1.1), "mlx"),
        (tuned(4096, SINGLE, 1.5, 1.2), tuned(65536, split(4), 1.5, 3.0), "split"),
        (tuned(4096, SINGLE, 1.5, 0.5), tuned(65536, split(4), 1.5, 1.6), "single"),
        (tuned(4096, SINGLE, 1.1, 0.2), tuned(65536, split(4), 0.4, 1.1), "mlx"),
        (tuned(4096, split(4), 1.0, 1.4), tuned(65536, MLX, 0.9, 0.9), "split"),  # wins below
        (tuned(4096, ROWS, 0.9, 0.9), tuned(65536, split(4), 1.0, 3.0), "split"),
        (tuned(4096, ROWS, 0.9, 0.9), tuned(65536, MLX, 0.9, 0.9), "mlx"),
    ],
)
def test_different_paths_are_decided_by_interpolated_speedups(
    lower: Tuned, upper: Tuned, path: str
) -> None:
    assert plan_at(16384, lower, upper).path == path  # half way by ratio


@pytest.mark.parametrize("value", [None, 0.0])
def test_without_speedups_mlx_is_taken(value: float | None) -> None:
    high = tuned(65536, split(4), 1.0, 3.0)
    assert plan_at(16384, tuned(4096, MLX, 1.0, value), high) == MLX
    assert plan_at(16384, tuned(4096, SINGLE, 1.5, value), high) == MLX
    assert plan_at(16384, tuned(4096, MLX, value, 1.0), tuned(65536, SINGLE, 1.5, 1.0)) == MLX
    assert plan_at(16384, tuned(4096, ROWS, value, value), high) == MLX


def test_native_plans_between_clear_the_gain_that_they_need() -> None:
    """Whatever two ends say: no native plan where the interpolated speed-up is below it."""
    rng = random.Random(3)
    plans = (MLX, ROWS, SINGLE, split(3), split(16))
    seen = set()
    for _ in range(2000):
        low, high = sorted(rng.sample(CONTEXT_GRID, 2))
        lower, upper = (
            tuned(c, rng.choice(plans), *(rng.choice([None, rng.uniform(0.2, 3)]) for _ in "ab"))
            for c in (low, high)
        )
        context = rng.randint(low, high)
        plan = plan_at(context, lower, upper, rng.choice([None, 2, 8, 80]))
        seen.add(plan.path)
        if lower.plan.path == upper.plan.path:
            assert plan.path == lower.plan.path
            continue
        share = share_of(context, lower, upper)
        speedup = speedups_between(share, lower, upper)._asdict().get(plan.path)
        both_native = lower.plan.native and upper.plan.native
        assert not plan.native or (speedup or 0) > MIN_GAIN or (both_native and plan == SINGLE)
    assert seen == {"mlx", "mlx_rows", "single", "split"}


def test_partitions_beside_one_split_follow_the_fitted_law() -> None:
    """A quarter of the context: half of the partitions; never more than the end that splits."""
    low, high = tuned(4096, MLX, 0.9, 0.99), tuned(65536, split(16), 1.0, 4.0)
    assert plan_at(16384, low, high).partitions == 8
    beyond = tuned(1 << 20, MLX, 0.9, 0.99)
    assert plan_at(131072, high, beyond).partitions == 16
    assert plan_at(16384, low, tuned(65536, split(2), 1.0, 4.0)).partitions == 2


def test_partitions_avoid_one_piece_more_than_a_wave() -> None:
    low, high = tuned(4096, split(4)), tuned(65536, split(20))
    assert round((4 * 20) ** 0.5) == 9  # what the law alone says for 16384
    assert plan_at(16384, low, high, cores=8).partitions == 8
    assert plan_at(16384, low, high, cores=None).partitions == 9
    # Ends that say otherwise are believed: nothing outside their range is tried.
    assert plan_at(16384, tuned(4096, split(9)), tuned(65536, split(9)), cores=8).partitions == 9
    # Where a winner leaves cores idle on purpose, less than a wave is no waste.
    low, high = tuned(4096, split(16)), tuned(65536, split(36))
    assert plan_at(16384, low, high, cores=80).partitions == 24
    # What could not be cut any finer says nothing of the kind.
    low, high = tuned(1024, split(16)), tuned(16384, split(MAX_PARTITIONS))
    assert plan_at(4096, low, high, cores=80).partitions == 64


def test_partitions_are_those_that_a_context_can_be_cut_in() -> None:
    """45 pieces of 3072 tokens are really 24: the nearest that exists are 48 of 64 tokens."""
    assert plan_at(3072, tuned(2048, split(32)), tuned(4096, split(64)), None).partitions == 48


def test_an_end_with_another_tile_counts_by_its_tasks() -> None:
    """20 rows are three groups of 8 or two of 16: 32 partitions of one are 48 of the other."""
    ends = [
        Tuned(bucket_of(context, 1, 20, "bfloat16"), Plan("split", count, tile))
        for context, count, tile in ((8192, 32, "r8"), (32768, 48, "r16"))
    ]
    plan = between(bucket_of(24576, 1, 20, "bfloat16"), ends[0], ends[1], 48)
    assert plan == Plan("split", 48, "r16")


@pytest.mark.parametrize("hardware", [cpu(1), cpu(2), cpu(8), h200()], ids=lambda h: h.device.key)
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_fitted_plans_lose_little_on_simulated_devices(hardware: Hardware, heads: int) -> None:
    """Every fourth context tuned by the model's own truth: at most 15 % are lost between them, and
    nothing to mlx.
    """
    backend, device = SimBackend(hardware), hardware.device
    truth = {}
    for context in CONTEXT_GRID:
        shape = Shape(context, 2, heads)
        plans = candidates(shape.bucket, device, backend)
        truth[context] = {plan: hardware.seconds(shape, plan) for plan in plans}
    known = {}
    for context in CONTEXT_GRID[::4]:
        times = truth[context]
        gains = [
            max(times[MLX] / seconds for plan, seconds in times.items() if plan.path == path)
            for path in ("single", "split")
        ]
        best = min(times, key=lambda plan: times[plan])
        known[context] = Tuned(
            Shape(context, 2, heads).bucket,
            best if times[MLX] > MIN_GAIN * times[best] else MLX,
            Speedups(*gains),
        )
    for low, high in pairwise(known):
        for context in CONTEXT_GRID:
            if low < context < high:
                shape = Shape(context, 2, heads)
                plan = between(shape.bucket, known[low], known[high], device.cores)
                seconds = hardware.seconds(shape, plan)
                assert seconds <= 1.15 * min(truth[context].values()), (context, plan)
                assert seconds <= truth[context][MLX], (context, plan)


def test_extreme_winners_break_nothing() -> None:
    """Counts beyond every limit after another tile's groups; contexts with few pieces."""
    rng = random.Random(7)
    for _ in range(100):
        low, high = sorted(rng.sample(CONTEXT_GRID, 2))
        lower, upper = (
            Tuned(
                bucket_of(context, rng.choice([1, 64]), 128, "bfloat16"),
                Plan(
                    "split",
                    rng.choice([2, 3, 64, MAX_PARTITIONS]),
                    rng.choice(["r1", "r16", "r128", ""]),
                ),
            )
            for context in (low, high)
        )
        for context in CONTEXT_GRID:
            if low < context < high:
                one = lower.bucket._replace(context=context)
                plan = between(one, lower, upper, rng.choice([None, 1, 8, 1000]))
                assert plan.path == "split"
                assert 2 <= plan.partitions <= MAX_PARTITIONS


# --- batches between buckets -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "bucket_batch", "batch", "cores", "wanted"),
    [
        (SINGLE, 4, 4, 2, SINGLE),  # the bucket's own batch
        (SINGLE, 4, 3, None, SINGLE),  # nothing to count with
        (MLX, 4, 3, 2, MLX),
        (SINGLE, 4, 3, 2, split(2)),  # 2 waves of whole contexts against 3 of halves
        (split(2), 4, 3, 8, split(5)),  # one wave of halves against two of fifths
        (split(16), 8, 6, 132, split(22)),  # 128 tasks of 132 cores, as many again
        (split(8), 4, 5, 32, split(6)),  # never another wave than the tuned ones
        (split(2), 1, 1000, 2, SINGLE),
    ],
)
def test_a_plan_is_cut_for_the_exact_batch(
    plan: Plan, bucket_batch: int, batch: int, cores: int | None, wanted: Plan
) -> None:
    both = Speedups(1.5, 1.5)
    assert for_batch(plan, bucket(32768, bucket_batch), batch, cores, both) == wanted


@pytest.mark.parametrize(
    ("plan", "batch", "speedups"),
    [
        (SINGLE, 3, Speedups(1.5, None)),  # nobody measured split there
        (SINGLE, 3, Speedups(1.5, 0.7)),  # slower than mlx
        (SINGLE, 3, Speedups(1.5, MIN_GAIN)),
        (split(2), 1000, Speedups(None, 1.5)),
        (ROWS, 3, Speedups(1.5, 1.5)),
    ],
)
def test_a_batch_changes_the_path_only_to_one_that_won(
    plan: Plan, batch: int, speedups: Speedups
) -> None:
    assert for_batch(plan, bucket(32768, 4), batch, 2, speedups) == plan


def test_plans_for_any_batch_are_legal() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        where = bucket(rng.choice(CONTEXT_GRID), rng.choice((1, 2, 4, 8, 64)))
        plan = rng.choice((SINGLE, split(rng.randint(2, MAX_PARTITIONS))))
        batch, cores = rng.randint(1, 300), rng.randint(1, 150)
        found = for_batch(plan, where, batch, cores, Speedups(1.5, 1.5))
        assert found.path == ("split" if found.partitions > 1 else "single")
        assert 1 <= found.partitions <= MAX_PARTITIONS
        assert found.tile == plan.tile
