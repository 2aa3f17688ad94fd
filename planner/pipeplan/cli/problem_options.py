"""The options that describe a problem and its search, shared by all commands that solve one, and their help.

`pipeplan.cli.solving` builds the problem from the options. This module imports no solver, so that help is printed
quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import click

from pipeplan.cli.options import PATH, bundled_clusters, bundled_profiles, complete_names, complete_words
from pipeplan.cli.output import print_line
from pipeplan.errors import InputError
from pipeplan.plan.schedules import SCHEDULES

Function = Callable[..., Any]


def _parse_pins(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[object, ...]:
    from pipeplan.from_options.option_fields import parse_pin

    return tuple(parse_pin(text) for text in texts)


def _parse_groups(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(tuple(name.strip() for name in text.split(",")) for text in texts)


def _parse_stages(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """(fewest stages, most stages) from a text such as `3` or `1-4`."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InputError(f"--stages: expected a number or a range, as in 3 or 1-4, found {text!r}")
    least, most = int(first), int(last or first)
    if not 1 <= least <= most:
        raise InputError(f"--stages: expected at least 1 stage, and the smaller number first, found {text!r}")
    if dash and least > 1 and least != most:
        raise InputError(f"--stages: a range begins with 1, as in 1-{most}; found {text!r}")
    return least, most


def _parse_staleness(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Largest age of gradients in updates, from a text such as `2` or `any`."""
    if text is None:
        return None
    if text.lower() == "any":
        return math.inf
    if not text.isdecimal():
        raise InputError(f"--staleness: expected a number of updates or any, found {text!r}")
    return int(text)


_OPTIONS = (
    click.argument("profile", required=False, type=PATH, shell_complete=complete_names(bundled_profiles, ".json")),
    click.option(
        "--cluster",
        "cluster_name",
        default="local",
        shell_complete=complete_names(bundled_clusters, ".toml"),
        help="Plan for this cluster: A, B, C, local, or a TOML file.",
    ),
    click.option("--servers", type=int, help="Use this number of servers instead of the cluster's own."),
    click.option("--workers", type=int, help="Use this number of workers, on a cluster of one server such as local."),
    click.option(
        "--batch", type=int, metavar="SAMPLES", help="Train this global batch  [default: a microbatch on every worker]"
    ),
    click.option(
        "--microbatch",
        type=int,
        metavar="SAMPLES",
        help="Cut the batch into microbatches of this size  [default: the best of the measured sizes]",
    ),
    click.option(
        "--staleness",
        metavar="N|any",
        callback=_parse_staleness,
        shell_complete=complete_words("any"),
        help="Allow gradients that are up to N updates old  [default: 0]",
    ),
    click.option(
        "--schedule",
        metavar="NAME",
        shell_complete=complete_words(*SCHEDULES),
        help=f"Use this training schedule: {', '.join(SCHEDULES)}  [default: the best; in `replan` that of the plan]",
    ),
    click.option("--inference", is_flag=True, help="Plan the forward pass only."),
    click.option("--stages", metavar="N|1-M", callback=_parse_stages, help="Use exactly N stages, or 1 to M."),
    click.option("--max-replicas", type=int, help="Limit the replicas of a stage; 1 gives an unreplicated pipeline."),
    click.option("--max-workers", type=int, help="Limit the busy workers; the others stay idle."),
    click.option("--grid", is_flag=True, help="Give every stage the same number of replicas."),
    click.option(
        "--pin",
        "pins",
        multiple=True,
        callback=_parse_pins,
        metavar="LAYER=STAGE",
        help="Put a layer in a stage, counted from 1; can be repeated.",
    ),
    click.option(
        "--together",
        multiple=True,
        callback=_parse_groups,
        metavar="A,B,…",
        help="Keep these layers in one stage; can be repeated.",
    ),
    click.option(
        "--shard-optimizer",
        is_flag=True,
        help="Divide the optimiser's state among the replicas of each stage (ZeRO stage 1).",
    ),
    click.option("--no-recompute", is_flag=True, help="Never drop activations and recompute them."),
    click.option("--ignore-memory", is_flag=True, help="Plan as if memory were unlimited."),
)


GROUPS = {
    "What I train": ("--batch", "--microbatch", "--staleness", "--schedule", "--inference"),
    "Where": ("--cluster", "--servers", "--workers", "--max-workers"),
    "Constraints": (
        "--stages",
        "--max-replicas",
        "--grid",
        "--pin",
        "--together",
        "--shard-optimizer",
        "--no-recompute",
        "--ignore-memory",
    ),
    "Search": ("--time-limit", "--solver"),
    "Output": ("--output", "--force", "--no-write", "--json", "--quiet", "--for", "--help"),
}
"""The options under each heading, in the order of the help."""
ESSENTIAL = (
    *("--batch", "--microbatch", "--staleness", "--cluster", "--servers", "--workers", "--max-workers", "--stages"),
    *("--lost", "--run", "--time-limit", "--output", "--force", "--json", "--for", "--help"),
)
"""The options that `-h` lists."""
_SHORT = "pipeplan.short help"


def _print_short_help(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        context.meta[_SHORT] = True
        print_line(context.get_help())
        context.exit()


class GroupedCommand(click.Command):
    """A command whose help lists its options under the headings of `groups`, and other options under "Options".

    `--help` lists all options; `-h` lists only the `essential` options.
    """

    groups: ClassVar[Mapping[str, Sequence[str]]] = GROUPS
    essential: ClassVar[Collection[str]] = ESSENTIAL

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # This separate parameter takes the name -h away from click's option for help.
        self.params.append(
            click.Option(
                ["-h"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                hidden=True,
                callback=_print_short_help,
                help="Show the essential options.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options to the help."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.opts[-1]: record for option in options if (record := option.get_help_record(ctx))}
        records["--help"] = ("-h, --help", "Show the essential options with -h, all of them with --help.")
        grouped = {name for names in self.groups.values() for name in names}
        further = [name for name in records if name not in grouped]
        for heading, names in {"Options": further, **self.groups}.items():
            shown = [name for name in names if name in records and (name in self.essential or _SHORT not in ctx.meta)]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl([records[name] for name in shown])


def search_options(function: Function) -> Function:
    """`--solver` and `--time-limit`, as `pipeplan.cli.solving.settings_of` reads them."""
    words = "Search for at most this many seconds; by default, the second solver has 4 seconds to confirm a proof."
    solvers = click.option(
        "--solver",
        type=click.Choice(["dp", "ilp", "both"]),
        default="both",
        help="Run this solver; `both` compares the results of the two.",
    )
    return solvers(click.option("--time-limit", type=float, default=60.0, help=words)(function))


def problem_options(*without: str) -> Callable[[Function], Function]:
    """A decorator that gives a command all options that describe a problem, except those named in `without`."""

    def decorate(function: Function) -> Function:
        # Decorators apply from last to first. Each is applied to a dummy to find out the name of its parameter.
        for option in reversed(_OPTIONS):
            dummy: Any = option(lambda: None)
            if dummy.__click_params__[0].name not in without:
                function = option(function)
        return function

    return decorate
