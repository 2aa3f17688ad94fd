"""`pipeplan import`: PipeDream's profiles, and link measurements of nccl-tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeplan.cli.options import PATH, force_option, json_option, output_file, quiet_option
from pipeplan.cli.output import note, print_json, print_line
from pipeplan.cluster_data import cluster_edit
from pipeplan.cluster_data.cluster import Level
from pipeplan.errors import InputError
from pipeplan.importers import FORMATS, NCCL_TESTS, nccl_tests, pipedream, recognise_format
from pipeplan.importers.nccl_tests import MeasuredLevel, level_from_runs
from pipeplan.util.files import refuse_to_replace
from pipeplan.util.text import one_line
from pipeplan.util.units import parse_rate, show_rate, show_size, show_time

_LINK_OPTIONS = ("operation", "into", "level", "bandwidth")
_PROFILE_OPTIONS = ("microbatch", "device_name")


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PATH)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Read FILE as this tool writes it  [default: recognised from its content]",
)
@click.option("--microbatch", type=int, metavar="N", help="Take times as those of a microbatch of N samples.")
@click.option("--bandwidth", metavar="RATE", help="State efficiencies relative to this nominal bandwidth.")
@click.option(
    "--device-name",
    default="",
    show_default=False,
    metavar="NAME",
    help="Record this name of the device that was measured.",
)
@click.option(
    "--operation",
    type=click.Choice(["all_reduce", "sendrecv"]),
    help="Read a file that names no operation as one of this.",
)
@click.option("--into", type=PATH, metavar="CLUSTER", help="Put the links into a copy of this cluster file.")
@click.option(
    "--level",
    metavar="NAME",
    help="Replace this level of the cluster file  [default: the outermost; the innermost for one host]",
)
@output_file(note="profile.json")
@force_option
@json_option
@quiet_option
def command(files: tuple[Path, ...], kind: str | None, output: Path | None, force: bool, **options: Any) -> None:
    """Convert a profile of PipeDream, or put links measured by nccl-tests into a cluster file.

    \b
    pipeplan import graph.txt --microbatch 128 -o vgg16.json
    pipeplan import all_reduce.json sendrecv.json --into lab.toml --level cluster -o measured.toml
    """
    kinds = {kind or recognise_format(file) for file in files}
    if kinds == {NCCL_TESTS}:
        _refuse(options, _PROFILE_OPTIONS, "a profile", files)
        _import_links(files, output, force, options)
    elif len(files) > 1:
        raise InputError("several files are only read together if all are runs of nccl-tests, for one level")
    else:
        _refuse(options, _LINK_OPTIONS, "nccl-tests output", files)
        _import_profile(files[0], output or Path("profile.json"), force, options)


def _refuse(options: dict[str, Any], names: tuple[str, ...], what: str, files: tuple[Path, ...]) -> None:
    for name in names:
        if options[name]:
            raise InputError(f"--{name.replace('_', '-')} is for {what}, which {files[0]} is not: leave it out")


def _import_profile(file: Path, output: Path, force: bool, options: dict[str, Any]) -> None:
    refuse_to_replace(output, force=force)
    profile = pipedream.read_pipedream_profile(file, options["microbatch"], options["device_name"])
    profile.save(output)
    if options["as_json"]:
        print_json(profile.to_json())
        return
    size = sum(layer.parameter_bytes for layer in profile.layers)
    print_line(
        f"{output}: {len(profile.layers)} layers, {show_time(profile.total_s)} forward and backward, "
        f"{show_size(size)} of parameters, microbatch {profile.minibatch}"
    )
    for remark in profile.provenance.notes:
        print_line(f"  {one_line(remark)}")


def _import_links(files: tuple[Path, ...], output: Path | None, force: bool, options: dict[str, Any]) -> None:
    into, level_name = options["into"], options["level"]
    if into is None and output is not None:
        raise InputError("a level alone is no cluster file: name one to put it into with --into, or leave out -o")
    if into is None and level_name is not None:
        raise InputError("--level names a level of a cluster file: give that with --into")
    if into is not None and output is None:
        raise InputError("say which file to write with -o (the cluster file itself, with --force, to change it)")
    runs = [nccl_tests.read_nccl_tests(file, options["operation"]) for file in files]
    nominal = None if options["bandwidth"] is None else parse_rate(options["bandwidth"], "--bandwidth")
    if into is not None and output is not None:
        refuse_to_replace(output, force=force)
        _put_level(runs, nominal, into, level_name, output, options["as_json"])
        return
    level = level_from_runs(runs, nominal)
    head: dict[str, cluster_edit.Value] = {"name": "cluster" if level.servers else "server", "count": level.spans}
    _print_level(head | _fields(level), level, options["as_json"])


def _put_level(
    runs: list[nccl_tests.NcclTestsRun],
    nominal: float | None,
    into: Path,
    level_name: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write a copy of a cluster file with the measured level in it."""
    old = cluster_edit.level_to_edit(into, level_name, joins_servers=level_from_runs(runs, nominal).servers)
    # The file's bandwidth counts as the nominal one, so that an all-reduce does not change the rate of messages.
    new = _with_messages_of(old, level_from_runs(runs, nominal or old.bandwidth))
    fields = _fields(new)
    if new.bandwidth == old.bandwidth:
        del fields["bandwidth"]
    cluster_edit.write_cluster_text(output, cluster_edit.with_edited_level(into, old.name, fields))
    if as_json:
        _print_level({"name": old.name, **fields}, new, True)
        return
    print_line(
        f"{output}: level {one_line(old.name)} at {show_rate(new.bandwidth)}, all-reduce reaches "
        f"{new.allreduce_efficiency:.0%} of it, {show_time(new.latency_s)} a step"
    )
    if len(runs) == 1:
        rate = show_rate(old.bandwidth * old.sendrecv_efficiency)
        print_line(f"Messages stay at {rate}, as in {into}; a run of sendrecv_perf would measure them.")
    for line in new.errors:
        print_line(one_line(line))


def _print_level(fields: dict[str, cluster_edit.Value], level: MeasuredLevel, as_json: bool) -> None:
    """Print a level as TOML, to be pasted into a cluster file, or as JSON; the errors of the fit go to stderr."""
    if as_json:
        print_json(fields, ascii_only=True)
    else:
        print_line("\n".join(["[[level]]", *cluster_edit.toml_lines(fields)]))
    for line in level.errors:
        note(one_line(line))


def _with_messages_of(old: Level, new: MeasuredLevel) -> MeasuredLevel:
    """Keep the cluster file's rate of messages where no run of sendrecv was given."""
    if new.sendrecv_efficiency is not None or not old.bandwidth or new.bandwidth == old.bandwidth:
        return new
    kept = min(1.0, old.sendrecv_efficiency * old.bandwidth / new.bandwidth)
    return replace(new, sendrecv_efficiency=kept)


def _fields(level: MeasuredLevel) -> dict[str, cluster_edit.Value]:
    """The level's fields in a cluster file."""
    fields: dict[str, cluster_edit.Value] = {
        "bandwidth": f"{level.bandwidth / 1e9:.6g} GB/s",
        "latency": f"{level.latency_s * 1e6:.4g} us",
        "allreduce_efficiency": round(min(1.0, level.allreduce_efficiency), 4),
    }
    if level.sendrecv_efficiency is not None:
        fields["sendrecv_efficiency"] = round(min(1.0, level.sendrecv_efficiency), 4)
    return fields | {"source": one_line(level.source)}
