"""`pipeplan import`: convert profiles and link measurements of other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeplan import cluster_edit
from pipeplan.cli.options import force_option, json_option, output_file, quiet_option
from pipeplan.cli.output import note, print_json, print_line
from pipeplan.cli.overwrite import refuse_existing
from pipeplan.cluster_data import Level
from pipeplan.errors import InputError
from pipeplan.importers import dnn_partitioning, nccl_tests, pipedream, piper
from pipeplan.importers.given import UNITS, Given
from pipeplan.importers.level import Measured, measured
from pipeplan.importers.recognise import DNN_PARTITIONING, FORMATS, NCCL_TESTS, PIPEDREAM, recognise
from pipeplan.profile_data import Profile
from pipeplan.text import one_line
from pipeplan.units import parse_rate, show_rate, show_size, show_time

_LINK_OPTIONS = ("operation", "into", "level")
_PROFILE_OPTIONS = ("minibatch", "time_unit", "device_name")


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="The tool that wrote FILE  [default: recognised from its content]",
)
@click.option("--minibatch", type=int, metavar="N", help="Samples in the minibatch that the profile was measured with.")
@click.option(
    "--time-unit", type=click.Choice(list(UNITS)), help="Unit of the times in dnn-partitioning and Piper files."
)
@click.option(
    "--bandwidth",
    metavar="RATE",
    help="Bandwidth of the link that a workload's transfers take, or the nominal one of measured links.",
)
@click.option("--device-name", default="", metavar="NAME", help="Name of the device that the profile was measured on.")
@click.option(
    "--operation",
    type=click.Choice(["all_reduce", "sendrecv"]),
    help="Operation of an nccl-tests file that names none.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="CLUSTER",
    help="The cluster file whose level the measured links replace.",
)
@click.option(
    "--level",
    metavar="NAME",
    help="The level to replace  [default: the outermost, or the innermost for runs on one host]",
)
@output_file(note="profile.json")
@force_option
@json_option
@quiet_option
def command(files: tuple[Path, ...], kind: str | None, output: Path | None, force: bool, **options: Any) -> None:
    """Convert a profile of another tool into one of pipeplan, or measured links into a level of a cluster.

    \b
    pipeplan import graph.txt --minibatch 128 -o vgg16.json
    pipeplan import bert24_training.json --minibatch 8 --time-unit ms
    pipeplan import all_reduce.json sendrecv.json --into lab.toml --level cluster -o measured.toml
    """
    kinds = {kind or recognise(file) for file in files}
    if kinds == {NCCL_TESTS}:
        _refuse(options, _PROFILE_OPTIONS, "a profile", files)
        _links(files, output, force, options)
    elif len(files) > 1:
        raise InputError("one profile at a time: only the runs of nccl-tests for one level are read together")
    else:
        _refuse(options, _LINK_OPTIONS, "nccl-tests output", files)
        _profile(files[0], kinds.pop(), output or Path("profile.json"), force, options)


def _refuse(options: dict[str, Any], names: tuple[str, ...], what: str, files: tuple[Path, ...]) -> None:
    for name in names:
        if options[name]:
            raise InputError(f"--{name.replace('_', '-')} is for {what}, which {files[0]} is not: leave it out")


def _profile(file: Path, kind: str, output: Path, force: bool, options: dict[str, Any]) -> None:
    refuse_existing(output, force)
    if kind == PIPEDREAM and options["time_unit"] not in (None, "ms"):
        raise InputError("the times of PipeDream's format are milliseconds: leave --time-unit out")
    rate = None if options["bandwidth"] is None else parse_rate(options["bandwidth"], "--bandwidth")
    facts = Given(options["minibatch"], options["time_unit"], rate, options["device_name"])
    profile = _read(file, kind, facts)
    profile.save(output)
    if options["as_json"]:
        print_json(profile.to_json())
        return
    size = sum(layer.parameter_bytes for layer in profile.layers)
    print_line(
        f"{output}: {len(profile.layers)} layers, {show_time(profile.total_s)} forward and backward, "
        f"{show_size(size)} of parameters, minibatch {profile.minibatch}"
    )
    for remark in profile.provenance.notes:
        print_line(f"  {one_line(remark)}")


def _read(file: Path, kind: str, facts: Given) -> Profile:
    if kind == PIPEDREAM:
        return pipedream.load(file, facts.samples(file), facts.device_name)
    return dnn_partitioning.load(file, facts) if kind == DNN_PARTITIONING else piper.load(file, facts)


def _links(files: tuple[Path, ...], output: Path | None, force: bool, options: dict[str, Any]) -> None:
    into, name = options["into"], options["level"]
    if into is None and output is not None:
        raise InputError("one level is no cluster: name a cluster file with --into to put it into, or leave out -o")
    if into is None and name is not None:
        raise InputError("--level names a level of a cluster file: give that with --into")
    if into is not None and output is None:
        raise InputError("say which file to write with -o (the cluster file itself, with --force, to change it)")
    runs = [nccl_tests.load(file, options["operation"]) for file in files]
    nominal = None if options["bandwidth"] is None else parse_rate(options["bandwidth"], "--bandwidth")
    if into is None or output is None:
        found = measured(runs, nominal)
        head: dict[str, cluster_edit.Value] = {"name": "cluster" if found.servers else "server", "count": found.spans}
        _print_level(head | _fields(found), found, options["as_json"])
    else:
        refuse_existing(output, force)
        level = cluster_edit.level_of(into, name, joins_servers=measured(runs, nominal).servers)
        # The level's bandwidth stays the nominal one, because the rate of an all-reduce says nothing about messages.
        found = _with_message_rate_of(measured(runs, nominal or level.bandwidth), level)
        fields = _fields(found)
        if found.bandwidth == level.bandwidth:
            del fields["bandwidth"]
        cluster_edit.save(output, cluster_edit.with_level(into, level.name, fields))
        if options["as_json"]:
            _print_level({"name": level.name, **fields}, found, True)
            return
        print_line(
            f"{output}: level {one_line(level.name)} at {show_rate(found.bandwidth)}, all-reduce reaches "
            f"{found.allreduce_efficiency:.0%} of it, {show_time(found.latency_s)} a step"
        )
        if len(runs) == 1:
            rate = show_rate(level.bandwidth * level.sendrecv_efficiency)
            print_line(f"Messages stay at {rate}, as {into} has them: a run of sendrecv_perf beside it would say.")
        for line in found.errors:
            print_line(one_line(line))


def _print_level(level: dict[str, cluster_edit.Value], found: Measured, as_json: bool) -> None:
    """Print a level as JSON or as a table for a cluster file. Errors of the runs go to standard error."""
    if as_json:
        print_json(level, ascii_only=True)
    else:
        print_line("\n".join(["[[level]]", *cluster_edit.toml(level)]))
    for line in found.errors:
        note(one_line(line))


def _with_message_rate_of(found: Measured, level: Level) -> Measured:
    """The measurement, in which messages keep the rate of the cluster file if no run of sendrecv was given."""
    if found.sendrecv_efficiency is not None or not level.bandwidth or found.bandwidth == level.bandwidth:
        return found
    kept = min(1.0, level.sendrecv_efficiency * level.bandwidth / found.bandwidth)
    return replace(found, sendrecv_efficiency=kept)


def _fields(found: Measured) -> dict[str, cluster_edit.Value]:
    fields: dict[str, cluster_edit.Value] = {
        "bandwidth": f"{found.bandwidth / 1e9:.6g} GB/s",
        "latency": f"{found.latency_s * 1e6:.4g} us",
        "allreduce_efficiency": round(min(1.0, found.allreduce_efficiency), 4),
    }
    if found.sendrecv_efficiency is not None:
        fields["sendrecv_efficiency"] = round(min(1.0, found.sendrecv_efficiency), 4)
    return fields | {"source": one_line(found.source)}
