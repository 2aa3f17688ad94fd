"""`pipeplan calibrate RUN`: what a run measured, as a new profile and a new cluster file."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pipeplan import cluster_write, stored
from pipeplan.calibrate.calibrate import Calibrated, calibrate
from pipeplan.calibrate.observed import Observed, median, observe
from pipeplan.calibrate.result import Row, cluster_of, document, profile_of, rows
from pipeplan.cli.given import profile_of_plan
from pipeplan.cli.options import force_option, json_option, output_file, quiet_option
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.files import refuse_unwritable
from pipeplan.measured.run import Run, read
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.profile_data import Profile
from pipeplan.units import show_time

DISTURBED = 0.05
"""Share of a worker's time: if others took more of its core, that is said."""
MOST_SLACK = 1.25
"""By how much layers can be stretched without a word."""
_REMARK = "written by pipeplan calibrate; docs/calibrate.md"


@dataclass(frozen=True)
class _Given:
    """A run, its plan, and what the plan was made for."""

    run: Run
    path: Path
    problem: Problem
    plan: Plan
    digest: str
    """Of the profile that the plan was made from."""


@click.command("calibrate")
@click.argument("run_folders", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--plan",
    "home",
    type=click.Path(path_type=Path),
    help="The plan that ran  [default: the folder that RUN is in]",
)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="What the plan was made from  [default: found beside the plan, here, or among the bundled ones]",
)
@output_file(Path("calibrated.json"))
@click.option(
    "--cluster-output", type=click.Path(path_type=Path), help="The new cluster file  [default: beside it, .toml]"
)
@force_option
@click.option("--no-write", is_flag=True, help="Print the answer only.")
@json_option
@quiet_option
def command(
    run_folders: tuple[Path, ...],
    home: Path | None,
    profile_file: Path | None,
    output: Path,
    cluster_output: Path | None,
    force: bool,
    no_write: bool,
    as_json: bool,
) -> None:
    """Write what RUN measured into a new profile and a new cluster file. Several runs of one model are averaged.

    With --force, files that are there are replaced where they are calibrated ones.

    \b
    pipeplan calibrate plan/runs/20260131T120000Z
    pipeplan solve calibrated.json --cluster calibrated.toml -o plan-2
    """
    target = cluster_output or output.parent / f"{output.stem}.toml"
    given = _read(run_folders, home, profile_file)
    if not no_write:
        _refuse(output, target, force, [one.digest for one in given])
    problem = given[0].problem
    shared = bool(problem.cluster.shared_cores)
    by_plan: dict[str, list[Observed]] = {}
    for one in given:
        seen = observe(one.run, one.path, one.plan, one.problem.options, shared)
        by_plan.setdefault(one.run.plan, []).append(seen)
    runs = [median(of_one) for of_one in by_plan.values()]
    found = calibrate(runs, problem.profile, problem.cluster)
    if not no_write:
        _write(profile_of(found, runs, problem.profile), output, cluster_of(found, runs), target)
    if as_json:
        click.echo(json.dumps(document(found, runs, problem.profile), indent=1, allow_nan=False))
    else:
        _show(found, runs, rows(runs, problem.profile))
    for run in runs:
        if run.disturbed > DISTURBED:
            share = f"{min(1.0, run.disturbed):.0%}"
            click.echo(
                f"note: a worker of run {run.name} waited for a core {share} of its time: others used it", err=True
            )
    if found.slack > MOST_SLACK:
        share = f"{1 - 1 / found.slack:.0%}"
        click.echo(
            f"note: for {share} of the time no stage was busy: this holds for little but the plan that ran", err=True
        )
    if not no_write:
        names = f"{shlex.quote(str(output))} --cluster {shlex.quote(str(target))}"
        click.echo(f"written: {output}, {target}; solve again with: pipeplan solve {names}", err=True)


def _read(folders: tuple[Path, ...], named: Path | None, profile_file: Path | None) -> list[_Given]:
    found: list[_Given] = []
    for folder in folders:
        run = read(folder)
        home = named or run.folder.absolute().parent.parent
        if not stored.file_of(home).is_file():
            raise InputError(f"{run.folder} is not in the folder of its plan: name that with --plan")
        root, path = stored.document(home), stored.file_of(home)
        if not found:
            profile = profile_of_plan(root, path, profile_file)
        elif root["profile"]["minibatch"].integer() != profile.minibatch:
            raise InputError(f"{path} is for minibatches of another size than {found[0].path}: calibrate one size")
        plan = Plan.from_json(root["plan"])
        problem, plan = stored.of(root, _same_layers(profile, plan, path, found))
        digest = root["profile"]["digest"].text()
        if plan.digest(digest, problem.cluster.digest()) != run.plan:
            raise InputError(f"{run.folder} is a run of another plan than {path}: it was solved again since")
        _check_cluster(problem.cluster, path, found)
        found.append(_Given(run, path, problem, plan, digest))
    return found


def _same_layers(profile: Profile, plan: Plan, path: Path, found: list[_Given]) -> Profile:
    names = {name for stage in plan.stages for name in stage.layers}
    if names != {layer.name for layer in profile.layers}:
        raise InputError(f"{path} is a plan of another model than {found[0].path if found else 'its profile'}")
    return profile


def _check_cluster(cluster: Cluster, path: Path, found: list[_Given]) -> None:
    """Workers of other devices, or more of them on the same cores, take other times for the same layers."""
    if not found:
        return
    other = found[0].problem.cluster
    mine, its = ((one.devices, [level.count for level in one.levels]) for one in (cluster, other))
    if mine != its:
        raise InputError(f"{path} is for another cluster than {found[0].path}: calibrate their runs apart")


def _refuse(profile: Path, cluster: Path, force: bool, made_from: list[str]) -> None:
    """Only what was calibrated before is ever replaced, and not what the plan was made from."""
    if profile.absolute() == cluster.absolute():
        raise InputError(f"the profile and the cluster cannot both be {profile}: give another --cluster-output")
    for path, option in ((profile, "-o"), (cluster, "--cluster-output")):
        refuse_unwritable(path)
        if not path.is_file():
            continue
        if not force:
            raise InputError(f"{path} is there already: give another file with {option}, or --force to replace it")
        if path == cluster and not path.read_text(encoding="utf-8", errors="replace").startswith(f"# {_REMARK}"):
            raise InputError(f"{path} was not written by `pipeplan calibrate`: give another file with {option}")
    if profile.is_file():
        old = Profile.load(profile)
        if old.provenance.kind != "calibrated" or old.digest() in made_from:
            raise InputError(f"{profile} is a profile that plans are made from: give another file with -o")


def _write(profile: Profile, output: Path, cluster: Cluster, target: Path) -> None:
    """Both files or neither."""
    before = target.read_bytes() if target.is_file() else None
    cluster_write.save(cluster, target, [_REMARK])
    try:
        profile.save(output)
    except BaseException:
        with suppress(OSError):
            if before is None:
                target.unlink()
            else:
                target.write_bytes(before)
        raise


def _show(found: Calibrated, runs: list[Observed], stages: list[Row]) -> None:
    console = Console(highlight=False, markup=False)
    table = Table(box=None, padding=(0, 1), title="measured over the profile before", title_justify="left")
    for name in ("run", "stage", "layers", "forward", "backward", "update", "besides"):
        table.add_column(name, justify="left" if name in ("run", "layers") else "right")
    for row in stages:
        factors = ("-" if one is None else f"× {one:.3g}" for one in (row.forward, row.backward, row.update))
        layers = row.layers[0] if len(row.layers) == 1 else f"{row.layers[0]} … {row.layers[-1]}"
        table.add_row(row.run, str(row.stage), layers, *factors, show_time(row.own_s))
    console.print(table)
    for fitted in found.fitted:
        change = (
            f"{fitted.before:.3g} as before"
            if fitted.after == fitted.before
            else f"{fitted.before:.3g} -> {fitted.after:.3g}"
        )
        console.print(f"{fitted.operation} efficiency of level {fitted.level}: {change} ({fitted.why})")
    if found.unexplained:
        console.print(f"The pace is bound by {found.unexplained}, which runs do not tell apart: that is as it was.")
    else:
        console.print(f"All layers × {found.slack:.3g}, for the time in which stages wait for each other.")
    for run, pace in zip(runs, found.paces_s, strict=True):
        paces = ((run.predicted_s, "predicted"), (run.pace_s, "measured"), (pace, "calibrated"))
        told = ", ".join(f"{what} {1 / one:.4g}" for one, what in paces if one > 0)
        console.print(f"{run.plan.config}, minibatches/s: {told}")
