"""The options of `mla-tune`: one definition each, for every command that takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from .device import CHOICES
from .errors import plain
from .parse import DTYPE_NAMES, count, duration, several, word
from .plan import PATHS
from .shapes import (
    DEEPSEEK,
    GEOMETRIES,
    LAYOUTS,
    MAX_HEADS,
    MAX_Q_LEN,
    MAX_TUNED_BATCH,
    Geometry,
    Shape,
)

Decorator = Callable[[Any], Any]
# Options that may stand before a command, too.
_SHARED = ("device", "db", "model", "geometry", "as_json")

BESIDE_THE_DATABASE = Path("misses-*.json")  # --from-misses without a file: this very object

dtype_name = word(DTYPE_NAMES)
layout_name = word({name: name for name in LAYOUTS})
path_name = word({name: name for name in PATHS})


def options(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which help lists them."""

    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def option(
    name: str,
    parse: Callable[[str], Any],
    metavar: str,
    text: str,
    default: str | None = None,
    **more: Any,
) -> Decorator:
    """An option whose text `parse` reads; its default stands in its help."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    shown = default is not None
    more |= {"type": convert, "metavar": metavar, "default": default, "show_default": shown}
    return click.option(name, help=text, **more)


def _inherited(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """An option given before the command's name holds for the command too."""
    root = ctx.find_root()
    return root.params.get(param.name or "") if value is None and ctx is not root else value


db_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_inherited,
    help="Tuning database.  [default: MLA_TUNER_DB, else one in your data folder]",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    default=None,
    callback=_inherited,
    help="Print the result as JSON on stdout.",
)
device_option = click.option(
    "--device",
    type=click.Choice(CHOICES),
    callback=_inherited,
    help="Where to run.  [default: auto, MLX's own default device]",
)
model_option = click.option(
    "--model",
    metavar="NAME|config.json",
    callback=_inherited,
    help="Take heads and geometry from this model, or from its Hugging Face config.json.",
)
geometry_option = option(
    "--geometry",
    word({str(each): each for each in GEOMETRIES}),
    "RANK+ROPE",
    f"kv_lora_rank + rope_dim of the cache.  [default: the model's, else {DEEPSEEK}]",
    callback=_inherited,
)
lengths_option = option(
    "--lengths",
    several(count(0, 1 << 31), repeats=True),
    "N,N,..",
    "One ragged batch: each sequence's context.",
)


def grid_options(contexts: str, batches: str, heads: str, least: int) -> Decorator:
    """Lists of shapes, of which every combination is taken; with the defaults of one command."""
    tokens, sequences = several(count(least, 1 << 20)), several(count(1, MAX_TUNED_BATCH))
    queries, q_lens = several(count(1, MAX_HEADS)), several(count(1, MAX_Q_LEN))
    query_heads = f"Query heads on this device.  [default: the model's, else {heads}]"
    caches = "Cache layouts: paged (vllm-metal), dense (mlx-lm)."
    return options(
        model_option,
        option("--contexts", tokens, "N,N,..", "Tokens of the longest sequence.", contexts),
        option("--batches", sequences, "N,N,..", "Sequences decoded together.", batches),
        option("--heads", queries, "N,N,..", query_heads),
        option("--dtypes", several(dtype_name), "D,D,..", "Also float16, float32.", "bfloat16"),
        option("--q-lens", q_lens, "N,N,..", "Query tokens of each sequence.", "1"),
        option("--layouts", several(layout_name), "L,L", caches, "paged"),
        geometry_option,
    )


misses_option = click.option(
    "--from-misses",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=BESIDE_THE_DATABASE,
    metavar="[FILE]",
    help="Tune what servers missed, most frequent first.  [default FILE: all beside the database]",
)
# What other options say already, or give a meaning.
GRID_LISTS = ("contexts", "batches", "heads", "dtypes")
MISSES_LISTS = (*GRID_LISTS, "q_lens", "layouts", "model", "geometry")
WRAPPER_ONLY = ("trials", "csv", "markdown", "chart")


def _file_option(name: str, text: str) -> Decorator:
    return click.option(name, type=click.Path(dir_okay=False, path_type=Path), help=text)


wrapper_options = options(
    click.option(
        "--wrapper", is_flag=True, help="Time a step of whole attention modules, random weights."
    ),
    option(
        "--grid",
        word({name: name for name in ("upstream", "long")}),
        "upstream|long",
        "Shapes: heads 16,64,128, batch 1,8,32, context 128,2k,8k; or 1,8 and 32k,64k,128k.",
    ),
    option("--trials", count(1, 100), "N", "Repeats of each shape, with --wrapper.", "3"),
    _file_option("--csv", "Every latency, with --wrapper."),
    _file_option("--markdown", "The report, with --wrapper."),
    _file_option("--chart", "FILE.svg, or .png with cairosvg; with --wrapper."),
)


storage_option = click.option(
    "--storage",
    metavar="URL",
    help="Split the buckets with other machines of this kind: postgresql://user@host/database.",
)


def budget_option(default: str) -> Decorator:
    """How long a command may take."""
    return option("--budget", duration, "TIME", "Wall-clock time: 90s, 5m, 1h.", default)


# A URL that holds a user's name at most.
_OPEN_URL = re.compile(r"sqlite:///[^?]+|\w+://([\w.-]+@)?[\w.-]*(:[0-9]+)?(/[\w.-]*)?")


def printable(command: Sequence[str]) -> str:
    """A command that can be typed again, with no password in it: `URL` stands for one that may."""
    shown = []
    for before, text in zip(["", *command], command, strict=False):
        name = "--storage=" if text.startswith("--storage=") else ""
        storage = name or before == "--storage"
        secret = storage and not _OPEN_URL.fullmatch(text.removeprefix(name))
        shown.append(f"{name}URL" if secret else text)
    return shlex.join(shown)


# --- options that would be lost -----------------------------------------------------------------


def _given(ctx: click.Context, name: str) -> bool:
    """Whether an option was typed, not defaulted or inherited."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse_unused(ctx: click.Context) -> None:
    """Options before a command that it does not take would be lost without a word."""
    assert isinstance(ctx.command, click.Group)
    command = ctx.command.commands[ctx.invoked_subcommand or ""]
    if isinstance(command, click.Group):
        return  # it asks the same of its own command
    taken = {param.name for param in command.params}.intersection(_SHARED)
    root = ctx.find_root()
    for param in root.command.params:
        if param.name not in taken and _given(root, param.name or ""):
            raise click.UsageError(
                f"{param.opts[0]} stands before {ctx.invoked_subcommand!r}; "
                "if that command takes it, put it behind"
            )


def refuse_together(ctx: click.Context, name: str, *others: str) -> None:
    """Where one option says all that others would say, those would be lost without a word."""
    both = [other for other in others if _given(ctx, name) and _given(ctx, other)]
    if both:
        text = f"--{name} says it all: leave out --{' and --'.join(both)}"
        raise click.UsageError(text.replace("_", "-"))


def refuse_without(ctx: click.Context, name: str, *others: str) -> None:
    """What only one option gives a meaning would be lost without it."""
    lost = [f"--{other}" for other in others if _given(ctx, other)]
    if lost and not _given(ctx, name):
        raise click.UsageError(f"only with --{name}: {', '.join(lost)}")


# --- shapes -------------------------------------------------------------------------------------


def model_of(
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


def one_shape(
    context: int | None,
    batch: int | None,
    lengths: tuple[int, ...] | None,
    model: str | None,
    heads: int | None,
    geometry: Geometry | None,
    **rest: Any,
) -> Shape:
    """The shape that `plan` is asked about. Wrong combinations are usage errors."""
    all_heads, of_model = model_of(model, (heads,) if heads else None, geometry, ())
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
        raise click.UsageError(plain(error)) from error


def shapes_of(
    model: str | None,
    heads: tuple[int, ...] | None,
    geometry: Geometry | None,
    lengths: tuple[int, ...] | None,
    **lists: Any,
) -> list[Shape]:
    """Every combination of the lists that `bench` was given."""
    all_heads, of_model = model_of(model, heads, geometry, (16,))
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
