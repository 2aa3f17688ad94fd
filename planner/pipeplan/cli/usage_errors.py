"""One-line messages for unknown options, values and arguments, which suggest the nearest valid ones."""

from __future__ import annotations

import difflib
import sys

import click

from pipeplan.util.text import did_you_mean

GONE_COMMANDS = {
    "models": "write pipeplan list models",
    "clusters": "write pipeplan list clusters",
    "trace": "write pipeplan simulate PLAN --trace FILE, and --run RUN for a measured timeline",
    "render": "write pipeplan export KIND PLAN",
    "replay": "pipeplan simulate takes its place; pipeplan docs evidence/replay has the script that emulates a cluster",
    "completion": 'eval "$(_PIPEPLAN_COMPLETE=bash_source pipeplan)" turns it on: see pipeplan docs tutorial',
}
"""Commands of earlier versions, each with its replacement."""
GONE = {
    "--minibatch": "--microbatch takes its place",
    "--accumulate": "--batch takes its place: the global batch in samples",
    "--straight": "write --max-replicas 1",
    "--max-stages": "write --stages 1-N",
    "--no-cut-after": "--together keeps layers in one stage",
    "--virtual-stages": "the best number is found with --schedule interleaved-1f1b",
    "--correction": "it follows from --staleness and the optimiser; launch.sh takes --correction",
    "--overlap": "it follows from the device",
    "--no-contention": "shared network cards are always charged",
    "--boundary": "the model of docs/cost-model.md is always used",
    "--ilp-solver": "HiGHS is always used",
    "--gap": "--time-limit ends a search earlier",
    "--no-certificate": "every plan has its proof",
    "--no-simulation": "plans are always compared by their simulated time",
    "--jobs": "a search has one process",
    "--simplest": "the simplest plan within 3% of the fastest is always taken",
    "--asynchronous-gain": "--staleness N allows gradients up to N updates old",
    "--objective": "--staleness N allows gradients up to N updates old",
    "--server-order": "the best order is always found",
    "--fewest-workers": "of plans within 3% the one with fewer workers is taken; --max-workers limits them",
    "--epochs": "launch.sh takes --epochs",
    "--dataset-size": "the job's data state this number",
    "--tokens-per-sample": "the job's `tokens_per_sample` states this number",
    "--report": "pipeplan report PLAN writes it",
}
"""Options of the planning commands of earlier versions, each with its replacement."""
GONE_ELSEWHERE = {
    ("profile", "--batch"): "--microbatch takes its place",
    ("profile", "--minibatch"): "--microbatch takes its place",
    ("profile", "--processes"): "a profile of a CPU has times with all cores busy too",
    ("profile", "--no-load"): "a profile of a CPU always has times with all cores busy too",
    ("profile", "--measure-all"): "of identical layers one is always measured",
    ("profile", "--no-executor-costs"): "the executor is measured once on each machine",
    ("profile show", "--svg"): "pipeplan report draws the graph of a planned model",
    ("profile show", "--dot"): "pipeplan report draws the graph of a planned model",
    ("calibrate", "--cluster-output"): "the cluster file lies beside the profile of -o, with the suffix .toml",
    ("import", "--minibatch"): "--microbatch takes its place",
    ("import", "--into"): "pipeplan profile --links measures links; docs/cluster.md says where those of nccl-tests go",
    ("simulate", "--minibatches"): "--microbatches takes its place",
    ("simulate", "--transport"): "messages between GPUs are simulated as those of gloo",
    ("report", "--thorough"): "pipeplan explain PLAN finds the second-best plan",
    ("sweep", "--svg"): "--csv writes the figures",
    ("sweep", "--solver"): "the dynamic program solves alone; pipeplan solve runs both solvers",
    ("explain", "--solver"): "the dynamic program solves alone; pipeplan solve runs both solvers",
    ("export", "--list"): "pipeplan export --help lists the targets",
    ("export", "--for"): "write pipeplan export TARGET PLAN",
}
"""Options of other commands of earlier versions, or that users may expect, each with its replacement."""
NEAR = 0.6
"""Smallest similarity of a suggested option, as a ratio of `difflib`."""


def usage_message(error: click.ClickException) -> str:
    """An error of click in one line that suggests the nearest valid word, or names the help that lists all of them."""
    message = error.format_message().rstrip(".")
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in message:
        return f"{error.option_name} needs a value after it: see --help"
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    path = " ".join(error.ctx.command_path.split())
    if isinstance(error, click.NoSuchOption):
        return f"{path}: there is no option {error.option_name}; {_near(error.option_name, error.ctx, path)}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{path}: {error.param.make_metavar(error.ctx)} is missing: see {path} --help"
    if isinstance(error, click.BadParameter):
        if error.param is not None and isinstance(error.param.type, click.Choice):
            return _choice(error, error.param, error.param.type) or message
        return f"{path}: {message[:1].lower()}{message[1:]}"
    if message.endswith("?"):
        return message
    return f"{path}: {message[:1].lower()}{message[1:]}: see {path} --help"


def _near(typed: str, context: click.Context, path: str) -> str:
    command = path.removeprefix("pipeplan ")
    gone = GONE if command in ("solve", "explain", "sweep", "replan") else {}
    if advice := gone.get(typed) or GONE_ELSEWHERE.get((command, typed)):
        return advice
    options = [param for param in context.command.get_params(context) if isinstance(param, click.Option)]
    known = {name.lstrip("-"): name for option in options for name in option.opts if name.startswith("--")}
    if owner := _owner(typed, context):
        return f"it is one of {owner}: write pipeplan {owner} {typed}"
    near = difflib.get_close_matches(typed.lstrip("-").lower(), known, n=2, cutoff=NEAR)
    return f"did you mean {' or '.join(known[name] for name in near)}?" if near else f"{path} --help lists its options"


def _owner(typed: str, context: click.Context) -> str | None:
    """The command that has this option, if the user wrote the option before the command's name."""
    group = context.command
    if context.parent is not None or not isinstance(group, click.Group):
        return None
    named = next((word for word in sys.argv[1:] if word in group.list_commands(context)), None)
    command = None if named is None else group.get_command(context, named)
    has_option = command is not None and any(typed in param.opts for param in command.params)
    return named if has_option else None


def _choice(error: click.BadParameter, parameter: click.Parameter, kind: click.Choice[str]) -> str:
    # Only click's message contains the value that the user gave.
    _, quote, rest = error.message.partition("'")
    typed, separator, _ = rest.partition("' is not ")
    if not quote or not separator:
        return ""
    name = parameter.opts[-1] if isinstance(parameter, click.Option) else str(parameter.human_readable_name)
    return f"{name}: there is no {typed!r}; {did_you_mean(typed, [str(choice) for choice in kind.choices])}"
