"""The options of `mla-tune`: one definition each, for every command that takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .device import CHOICES
from .parse import DTYPE_NAMES, count, duration, several, word
from .plan import PATHS
from .shapes import DEEPSEEK, GEOMETRIES, LAYOUTS, MAX_HEADS, MAX_Q_LEN

Decorator = Callable[[Any], Any]
# Options that may stand before a command, too.
_SHARED = ("device", "db", "model", "geometry", "as_json")

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
    tokens, sequences = several(count(least, 1 << 20)), several(count(1, 256))
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


def budget_option(default: str) -> Decorator:
    """How long a command may take."""
    return option("--budget", duration, "TIME", "Wall-clock time: 90s, 5m, 1h.", default)


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
        raise click.UsageError(f"--{name} says it all: leave out --{' and --'.join(both)}")
