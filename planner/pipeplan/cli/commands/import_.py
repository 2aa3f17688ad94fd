"""`pipeplan import`: converts a profile of PipeDream."""

from __future__ import annotations

from pathlib import Path

import click

from pipeplan.cli.options import PATH, force_option, json_option, output_file, quiet_option
from pipeplan.cli.output import print_json, print_line
from pipeplan.problem.plan_profile import PROFILE
from pipeplan.profile_data.pipedream import read_pipedream_profile
from pipeplan.util.files import refuse_to_replace
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time


@click.command("import")
@click.argument("file", type=PATH)
@click.option(
    "--microbatch", type=int, metavar="N", help="Read the file's times as times of a microbatch of N samples."
)
@click.option(
    "--device-name",
    default="",
    show_default=False,
    metavar="NAME",
    help="Record this name of the device that was measured.",
)
@output_file(Path(PROFILE))
@force_option
@json_option
@quiet_option
def command(file: Path, microbatch: int | None, device_name: str, output: Path, force: bool, as_json: bool) -> None:
    """Convert FILE, a graph.txt that PipeDream's profiler has written, to a profile.

    \b
    pipeplan import graph.txt --microbatch 128 -o vgg16.json
    """
    refuse_to_replace(output, force=force)
    profile = read_pipedream_profile(file, microbatch, device_name)
    profile.save(output)
    if as_json:
        print_json(profile.to_json())
        return
    size = sum(layer.parameter_bytes for layer in profile.layers)
    print_line(
        f"{output}: {len(profile.layers)} layers, {show_time(profile.total_s)} forward and backward, "
        f"{show_size(size)} of parameters, microbatch {profile.minibatch}"
    )
    for remark in profile.provenance.notes:
        print_line(f"  {one_line(remark)}")
