"""The sections that time the kernel: each adds figures with targets to the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_tuner.cases import Case
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import DTYPES, Shape
from tools.peaks.peaks import Reader
from tools.peers import torch_cpu

from . import kernels
from .kernels import Errors
from .results import Figure, FormTime, Results
from .rounds import Form, Rounds, interleave

# GNU OpenMP's threads spin for milliseconds after their work, on the core that the next form needs.
OPENMP_REST_S = 0.006


@dataclass(frozen=True)
class Options:
    """seconds: for each shape and thread count. shrink: divides contexts, for a quick look only."""

    seconds: float = 1.0
    threads: tuple[int, ...] = (1, 2)
    shrink: int = 1

    def context(self, tokens: int) -> int:
        return max(256, tokens // self.shrink)


def time_forms(
    section: str,
    case: Case,
    forms: Sequence[Form],
    errors: Errors,
    threads: int,
    options: Options,
    results: Results,
) -> Rounds:
    """Run the rounds of one shape and note every form's times."""
    rest_s = OPENMP_REST_S if any(form.name.startswith("torch") for form in forms) else 0.0
    rounds = interleave(forms, threads=threads, seconds=options.seconds, rest_s=rest_s)
    own = rounds.min(rounds.best("own"))
    for form in forms:
        if form.kind != "probe":
            best = rounds.min(form.name)
            results.forms.append(
                FormTime(
                    *(section, short(case.shape), threads, form.name, form.kind),
                    *(len(rounds.samples(form.name)), 1e6 * best, 1e6 * rounds.median(form.name)),
                    *(case.shape.flop / best / 1e9, best / own, errors.get(form.name)),
                )
            )
    return rounds


def short(shape: Shape) -> str:
    context = shape.context
    size = f"{context >> 10}K" if context % 1024 == 0 else f"{context} token" + "s" * (context > 1)
    return f"heads {shape.heads} {size} {shape.dtype}"


# --- share of the machine's peaks ----------------------------------------------------------------

# heads, context, dtypes, targets in % for one thread and for two.
PEAK_TARGETS = (
    (128, 2048, DTYPES, (82, 78)),
    (128, 8192, DTYPES, (82, 78)),
    (128, 32768, DTYPES, (82, 78)),
    (16, 32768, ("bfloat16", "float16"), (75, 72)),
    (16, 32768, ("float32",), (66, 66)),
    (20, 2048, DTYPES, (66, 66)),
    (20, 32768, DTYPES, (66, 66)),
)
READ_TARGET = 75  # % of the read bandwidth at that size, heads 1


def peak(options: Options, results: Results) -> None:
    """Our best form's share of the multiply-add peak, or of the read bandwidth, of its rounds."""
    for heads, context, dtypes, targets in PEAK_TARGETS:
        for dtype in dtypes:
            case = kernels.paged_case(heads, options.context(context), dtype)
            for threads in options.threads:
                _peak_share(case, threads, targets[threads > 1], options, results)
    for dtype in DTYPES:
        case = kernels.paged_case(1, options.context(32768), dtype)
        for threads in options.threads:
            _read_share(case, threads, options, results)


def _peak_share(
    case: Case, threads: int, target: float, options: Options, results: Results
) -> None:
    kernels.set_threads(threads)
    errors = Errors()
    forms = kernels.own_forms(case, threads, errors)
    rounds = time_forms("peak", case, forms, errors, threads, options, results)
    best = rounds.best("own")
    rate = case.shape.flop / rounds.min(best) / 1e9
    share = 100 * rate / rounds.peak()
    figure = Figure("peak", "share of FMA peak", short(case.shape), threads, share, "%", target)
    note = f"{rate:.0f} of {rounds.peak():.0f} GFLOP/s"
    results.figures.append(figure.of(rounds, best, note))


def _read_share(case: Case, threads: int, options: Options, results: Results) -> None:
    kernels.set_threads(threads)
    errors = Errors()
    forms = kernels.own_forms(case, threads, errors)
    nbytes = case.shape.cache_bytes
    with Reader(nbytes) as reader:
        seconds = lambda: nbytes / reader.gb_per_s(threads, passes=3) / 1e9  # noqa: E731
        probe = Form("read", "probe", seconds)
        rounds = time_forms("peak", case, [*forms, probe], errors, threads, options, results)
    best = rounds.best("own")
    share = 100 * rounds.min("read") / rounds.min(best)
    gb_per_s = nbytes / 1e9 / rounds.min(best)
    note = f"{gb_per_s:.1f} of {nbytes / 1e9 / rounds.min('read'):.1f} GB/s"
    figure = Figure(
        *("peak", "share of read bandwidth", short(case.shape), threads, share, "%", READ_TARGET)
    )
    results.figures.append(figure.of(rounds, best, note))


# --- other libraries -----------------------------------------------------------------------------

# heads, contexts, dtype, target: seconds of the best PyTorch form over ours.
TORCH_TARGETS = (
    (16, (2048, 32768), "bfloat16", 2.0),
    (16, (2048, 32768), "float16", 1.8),
    (16, (2048, 32768), "float32", 1.5),
    (20, (2048, 32768), "bfloat16", 2.0),
    (20, (2048, 32768), "float16", 1.8),
    (128, (8192,), "bfloat16", 1.4),
    (128, (8192,), "float16", 1.15),
    (128, (8192,), "float32", 1.15),
)


def torch(options: Options, results: Results) -> None:
    """The best PyTorch form over our best, same process and threads."""
    if not torch_cpu.available():
        results.notes.append(f"section torch left out: {torch_cpu.MISSING}")
        return
    for heads, contexts, dtype, target in TORCH_TARGETS:
        for context in contexts:
            case = kernels.paged_case(heads, options.context(context), dtype)
            for threads in options.threads:
                _torch_ratio(case, threads, target, options, results)


def _torch_ratio(
    case: Case, threads: int, target: float, options: Options, results: Results
) -> None:
    kernels.set_threads(threads)
    errors = Errors()
    forms = kernels.own_forms(case, threads, errors) + kernels.torch_forms(case, errors)
    rounds = time_forms("torch", case, forms, errors, threads, options, results)
    own, peer = rounds.best("own"), rounds.best("peer")
    figure = Figure(
        *("torch", "best PyTorch form over ours", short(case.shape), threads),
        *(rounds.ratio(peer, own), "x", target),
    )
    note = f"{peer}; {rounds.min(peer) / rounds.min(own):.2f}x by minimum"
    results.figures.append(figure.of(rounds, own, note))


MLX_TARGETS = {"mlx": 100, "mlx_rows": 30}


def mlx(options: Options, results: Results) -> None:
    """MLX's own paths over ours: heads 16, batch 1, 32K, bfloat16, all threads."""
    threads = max(options.threads)
    kernels.set_threads(threads)
    case, errors = kernels.paged_case(16, options.context(32768), "bfloat16"), Errors()
    forms = kernels.own_forms(case, threads, errors)
    forms += [kernels.op_form(case, plan, errors, "slow") for plan in (MLX, Plan("mlx_rows"))]
    rounds = time_forms("mlx", case, forms, errors, threads, options, results)
    own = rounds.best("own")
    for name, target in MLX_TARGETS.items():
        figure = Figure(
            *("mlx", f"{name} over ours", short(case.shape), threads),
            *(rounds.ratio(name, own), "x", target),
        )
        note = f"{name} takes {1e3 * rounds.min(name):.0f} ms"
        results.figures.append(figure.of(rounds, own, note))
    results.notes.append(
        "MLX's CPU build links a reference BLAS and runs on one thread: its figures say nothing"
        " about GPUs."
    )


# --- partitions ----------------------------------------------------------------------------------

SPLIT_SHAPES = (
    *((32768, dtype) for dtype in DTYPES),
    (131072, "bfloat16"),
)
SPLIT_TARGET, SPLIT_LOSS_TARGET = 1.85, 3  # times `single` on two threads; % lost on one


def split(options: Options, results: Results) -> None:
    """Two partitions against one, where one row tile is all there is."""
    for context, dtype in SPLIT_SHAPES:
        case = kernels.paged_case(16, options.context(context), dtype)
        for threads in options.threads:
            _split_gain(case, threads, options, results)


def _split_gain(case: Case, threads: int, options: Options, results: Results) -> None:
    kernels.set_threads(threads)
    errors = Errors()
    tile = kernels.default_tile(case.shape)
    single, halves = Plan("single", 1, tile), Plan("split", 2, tile)
    kinds = ((single, "own"), (halves, "two"))
    forms = [kernels.op_form(case, plan, errors, kind) for plan, kind in kinds]
    rounds = time_forms("split", case, forms, errors, threads, options, results)
    gain = rounds.ratio(str(single), str(halves))
    if threads == 1:
        figure = Figure(
            *("split", "loss of split x2 on one thread", short(case.shape), threads),
            *(100 * (1 / gain - 1), "%", SPLIT_LOSS_TARGET, False),
        )
    else:
        figure = Figure(
            *("split", "split x2 over single", short(case.shape), threads),
            *(gain, "x", SPLIT_TARGET),
        )
    results.figures.append(figure.of(rounds, str(halves)))
