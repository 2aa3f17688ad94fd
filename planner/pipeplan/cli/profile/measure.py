"""`pipeplan profile MODEL`: measure the cost of a model's layers here, or estimate it for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import click

from pipeplan.api import profile
from pipeplan.cli.options import (
    complete_names,
    device_names,
    force_option,
    json_option,
    model_words,
    output_file,
    quiet_option,
    seed_option,
)
from pipeplan.cli.output import note, print_answer, print_json, progress_bar
from pipeplan.cli.problem_options import GROUPS, GroupedCommand
from pipeplan.cli.profile.table import measured_profile
from pipeplan.cluster_data.local import local_processors
from pipeplan.cluster_data.machine_costs import enabled, machine_costs, save
from pipeplan.errors import InputError
from pipeplan.first_steps.init import CLUSTER
from pipeplan.problem.plan_profile import PROFILE
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.profile_document import GRANULARITIES
from pipeplan.util.files import refuse_to_replace
from pipeplan.util.text import shell_path
from pipeplan.util.units import show_time

FIRST_PASS = "first pass"
"""The name of the profiler's step at which it begins to run the model."""


class _Measure(GroupedCommand):
    groups: ClassVar = {
        "What is measured": ("--microbatch", "--halvings", "--granularity", "--device", "--seed"),
        "How": ("--threads", "--repeats", "--self-check"),
        "Output": GROUPS["Output"],
    }
    essential: ClassVar = ("--microbatch", "--granularity", "--device", "--output", "--force", "--help")

    def format_usage(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # `measure` is the default command of `profile`, so its usage is that of the group.
        formatter.write_usage("pipeplan profile", "MODEL [OPTIONS] | --links [OPTIONS] | show FILE | diff FILE FILE")


@click.command("measure", cls=_Measure)
@click.argument("model", shell_complete=complete_names(model_words, ".py"))
@click.option(
    "--microbatch",
    "sizes",
    metavar="N[,N…]",
    help="Measure a microbatch of N samples, or several sizes in one run  [default: the model's own]",
)
@click.option(
    "--halvings",
    type=int,
    metavar="N",
    help="Also measure the microbatch halved up to N times, briefly  [default: 3, or 0 with several sizes]",
)
@click.option(
    "--device",
    default="cpu",
    metavar="cpu|cuda|NAME",
    shell_complete=complete_names(device_names, ".toml"),
    help="Measure on this device; or estimate for a device: v100, a100, h100, h200, titan-x, or a TOML file.",
)
@output_file(Path(PROFILE))
@force_option
@click.option("--threads", type=int, default=1, metavar="N", help="Compute with this number of threads.")
@click.option(
    "--granularity",
    type=click.Choice(GRANULARITIES),
    default="layer",
    help="Divide the model into members of lists of modules, calls of leaf modules, or single operators.",
)
@click.option(
    "--repeats", type=int, metavar="N", help="Measure this number of passes  [default: until the spread is small]"
)
@click.option(
    "--self-check/--no-self-check",
    default=True,
    help="First compare two training steps of the whole model with those of its stages; stop if they differ.",
)
@seed_option
@json_option
@quiet_option
def command(model: str, sizes: str | None, output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Measure the cost of each layer of MODEL: forward and backward time, and the bytes of its output, its parameters
    and the activations kept for the backward pass.

    MODEL is a bundled name (see `pipeplan list models`), path/to/file.py:callable or package.module:callable. The
    callable takes no arguments and returns a torch module with `example_input_array`, or a pipeplan_launch.Job. An
    older profile is replaced; any other file is replaced only with --force.

    \b
    pipeplan profile mnist
    pipeplan profile job.py:build --microbatch 16,32 --granularity module
    pipeplan profile mnist --device v100 -o mnist-v100.json
    """
    refuse_to_replace(output, force=force, mark=b'"pipeplan-profile"', what="a profile")
    measuring = {"microbatch": _sizes(sizes), **options}
    known = machine_costs()
    if options["device"] == "cpu" and enabled() and (known is None or known.disturbed):
        measured = _measure_with_executor(model, measuring, output)
    else:
        measured = _measure(model, measuring)
        measured.save(output)
    if as_json:
        print_json(measured.to_json(), ascii_only=True)
    else:
        print_answer(measured_profile(measured), wide=True)
        note(f"written: {output}\nnext: {_next(measured, output)}")
        if options["device"] == "cpu" and options["threads"] > (cores := local_processors().cores):
            note(f"note: {options['threads']} threads share {cores} cores: fewer would be as quick")


def _measure_with_executor(model: str, options: dict[str, Any], output: Path) -> Profile:
    """Measure and save the profile, then measure the executor's costs on this machine, and print them."""
    from pipeplan.profiler.measure_executor import ExecutorTrials

    with ExecutorTrials() as trials:
        measured = _measure(model, options, trials.wait_until_ready)
        measured.save(output)
        note("measuring what the executor itself costs on this machine: a few seconds, once")
        try:
            found = trials.measure()
            save(found)
        except InputError as error:
            note(
                f"note: the executor was not measured, as {error}; the next `pipeplan profile` tries again, best on an "
                "idle machine, and until then predictions leave out its time and a worker's own memory"
            )
            return measured
    busy = ", ".join(f"{count} workers {found.done_by(count):.2f}" for count in found.throughput if count > 1)
    note(f"executor: {show_time(found.costs.pass_s)} a pass; throughput relative to one worker: {busy}")
    if found.disturbed:
        note("note: other programs use this machine: the next `pipeplan profile` measures the executor again")
    return measured


def _next(profile: Profile, output: Path) -> str:
    """The command that plans with this profile."""
    file = "" if output == Path(PROFILE) else f" {shell_path(output)}"
    measured = profile.provenance.kind == "measured"
    cluster_file = output.parent / CLUSTER
    cluster = shell_path(cluster_file) if cluster_file.is_file() else "local --workers 3" if measured else "YOURS.toml"
    return f"pipeplan solve{file} --cluster {cluster}"


def _sizes(text: str | None) -> tuple[int, ...]:
    """The microbatch sizes in a text such as `32` or `8,16,32`."""
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--microbatch: expected a number of samples, or several as in 8,16,32, found {text!r}"
        ) from None


def _measure(model: str, options: dict[str, Any], before_passes: Callable[[], None] = lambda: None) -> Profile:
    """The profile of a model. `before_passes` is called before every measurement."""
    # Standard output is for the result, so output of the user's code goes to standard error.
    with progress_bar("loading") as update, redirect_stdout(sys.stderr):

        def progress(done: int, total: int, step: str) -> None:
            update(done, total, step)
            if step == FIRST_PASS:
                before_passes()

        return profile(model, progress=progress, **options)
