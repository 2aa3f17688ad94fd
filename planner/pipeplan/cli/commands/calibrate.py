"""`pipeplan calibrate RUN`: write a new profile and a new cluster file from the measurements of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table

from pipeplan.calibration.calibrate import Calibrated, calibrate
from pipeplan.calibration.measured_stages import ObservedRun, median_run, observe_run
from pipeplan.calibration.result import CalibratedStage, calibrated_stages, calibration_document, cluster_of, profile_of
from pipeplan.cli.options import (
    PATH,
    force_option,
    json_option,
    no_write_option,
    output_file,
    plan_profile_option,
    quiet_option,
)
from pipeplan.cli.output import note, print_answer, print_json, print_warning
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_toml import cluster_toml
from pipeplan.cluster_data.machine_costs import without_costs
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.run_data.run_folder import MeasuredRun, read_run
from pipeplan.util.files import refuse_to_replace, write_together
from pipeplan.util.text import shell_path
from pipeplan.util.units import show_time

DISTURBED = 0.05
"""A note reports workers that wait for a core for more than this share of their time."""
MOST_SLACK = 1.25
"""A note reports a larger factor on the times of all layers."""
_REMARK = "written by pipeplan calibrate"


@dataclass(frozen=True)
class _PlannedRun:
    """A run, its plan, and the problem that the plan was made for."""

    run: MeasuredRun
    path: Path
    problem: Problem
    plan: Plan
    digest: str
    """Digest of the profile that the plan was made from."""


@click.command("calibrate")
@click.argument("run_folders", metavar="RUN…", nargs=-1, required=True, type=PATH)
@click.option(
    "--plan", "home", type=PATH, help="Read the plan that ran from this folder  [default: the one that holds RUN]"
)
@plan_profile_option
@output_file(Path("calibrated.json"))
@force_option
@no_write_option
@json_option
@quiet_option
def command(
    run_folders: tuple[Path, ...],
    home: Path | None,
    profile_file: Path | None,
    output: Path,
    force: bool,
    no_write: bool,
    as_json: bool,
) -> None:
    """Write a new profile and a new cluster file from the measurements of RUN. Several runs of one model are averaged.

    The cluster file lies beside the profile, with the suffix .toml. With --force, existing files are replaced, but only
    those that `pipeplan calibrate` wrote.

    \b
    pipeplan calibrate plan/runs/20260131T120000Z
    pipeplan solve calibrated.json --cluster calibrated.toml -o plan-2
    """
    target = output.parent / f"{output.stem}.toml"
    planned_runs = _read(run_folders, home, profile_file)
    if not no_write:
        _refuse(output, target, force, [planned.digest for planned in planned_runs])
    problem = planned_runs[0].problem
    cluster = without_costs(problem.cluster)
    shared = bool(cluster.shared_cores)
    by_plan: dict[str, list[ObservedRun]] = {}
    for planned in planned_runs:
        observed = observe_run(planned.run, planned.path, planned.plan, planned.problem.options, shared)
        by_plan.setdefault(planned.run.plan, []).append(observed)
    runs = [median_run(of_one_plan) for of_one_plan in by_plan.values()]
    calibrated = calibrate(runs, problem.profile, cluster)
    if not no_write:
        new = profile_of(calibrated, runs, problem.profile)
        texts = {output.name: new.text_for(output), target.name: cluster_toml(cluster_of(calibrated, runs), [_REMARK])}
        write_together(output.parent, {name: (text, 0o666) for name, text in texts.items()}, force=True)
    if as_json:
        print_json(calibration_document(calibrated, runs, problem.profile), ascii_only=True)
    else:
        print_answer(_calibration_table(calibrated, runs, calibrated_stages(runs, problem.profile)), fold=True)
    print_warning(problem.profile, problem.cluster, as_json=True)
    for warning in _warnings(calibrated, runs):
        note(f"note: {warning}")
    if not no_write:
        names = f"{shell_path(output)} --cluster {shell_path(target)}"
        note(f"written: {output}, {target}; solve again with: pipeplan solve {names}")


def _warnings(calibrated: Calibrated, runs: list[ObservedRun]) -> Iterator[str]:
    for run in runs:
        if run.disturbed > DISTURBED:
            share = min(1.0, run.disturbed)
            cause = "other programs used the machine"
            yield f"a worker of run {run.name} waited for a core {share:.0%} of its time: {cause}"
    if calibrated.slack > MOST_SLACK:
        unused = 1 - 1 / calibrated.slack
        yield f"for {unused:.0%} of the time no stage was busy: the new profile is valid for hardly any other plan"


def _read(folders: tuple[Path, ...], named: Path | None, profile_file: Path | None) -> list[_PlannedRun]:
    """The runs with their plans. Raises `InputError` for runs that cannot be calibrated together."""
    planned_runs: list[_PlannedRun] = []
    for folder in folders:
        run = read_run(folder)
        home = named or run.folder.absolute().parent.parent
        if not plan_file.plan_file(home).is_file():
            raise InputError(f"{run.folder} is not in the folder of its plan: name that folder with --plan")
        root, path = plan_file.read_plan_document(home), plan_file.plan_file(home)
        first = planned_runs[0] if planned_runs else None
        if first is None:
            profile = profile_of_plan(root, path, profile_file)
        elif root["profile"]["minibatch"].integer() != profile.minibatch:
            raise InputError(f"{path} is for microbatches of another size than {first.path}: calibrate one size")
        plan = Plan.from_json(root["plan"])
        if {name for stage in plan.stages for name in stage.layers} != {layer.name for layer in profile.layers}:
            raise InputError(f"{path} is a plan of another model than {first.path if first else 'its profile'}")
        problem, plan = plan_file.plan_from_document(root, profile)
        digest = root["profile"]["digest"].text()
        if plan.digest(digest, problem.cluster.digest()) != run.plan:
            raise InputError(f"{run.folder} is a run of another plan than {path}, which was solved again since")
        if first and _shape(problem.cluster) != _shape(first.problem.cluster):
            raise InputError(f"{path} is for another cluster than {first.path}: calibrate their runs apart")
        planned_runs.append(_PlannedRun(run, path, problem, plan, digest))
    return planned_runs


def _shape(cluster: Cluster) -> tuple[object, ...]:
    """The devices and counts of a cluster. Times of clusters that differ in these are not comparable."""
    return cluster.devices, *(level.count for level in cluster.levels)


def _refuse(profile: Path, cluster: Path, force: bool, made_from: list[str]) -> None:
    """Refuse to replace a file that `pipeplan calibrate` did not write, or the profile that the plan was made from."""
    if profile == cluster:
        raise InputError(f"the profile and the cluster cannot both be {profile}: give another file with -o")
    for path in (profile, cluster):
        refuse_to_replace(path, force=force)
    if cluster.is_file() and not cluster.read_text(encoding="utf-8", errors="replace").startswith(f"# {_REMARK}"):
        raise InputError(f"{cluster} was not written by `pipeplan calibrate`: give another file with -o")
    if profile.is_file():
        old = Profile.load(profile)
        if old.provenance.kind != "calibrated" or old.digest() in made_from:
            raise InputError(f"{profile} is a profile that plans are made from: give another file with -o")


def _calibration_table(
    calibrated: Calibrated, runs: list[ObservedRun], stages: list[CalibratedStage]
) -> Iterator[RenderableType]:
    table = Table(box=None, padding=(0, 1), title="measured over the profile before", title_justify="left")
    for name in ("run", "stage", "layers", "forward", "backward", "update", "besides"):
        table.add_column(name, justify="left" if name in ("run", "layers") else "right")
    for row in stages:
        factors = ("-" if one is None else f"× {one:.3g}" for one in (row.forward, row.backward, row.update))
        layers = row.layers[0] if len(row.layers) == 1 else f"{row.layers[0]} … {row.layers[-1]}"
        table.add_row(row.run, str(row.stage), layers, *factors, show_time(row.own_s))
    yield table
    for fitted in calibrated.fitted:
        change = (
            f"{fitted.before:.3g} as before"
            if fitted.after == fitted.before
            else f"{fitted.before:.3g} -> {fitted.after:.3g}"
        )
        yield f"{fitted.operation} efficiency of level {fitted.level}: {change} ({fitted.why})"
    if calibrated.unexplained:
        bound = calibrated.unexplained
        yield f"The step time is bound by {bound}, whose figures do not follow from the runs: they stay as they were."
    else:
        yield f"All layers × {calibrated.slack:.3g}, for the time in which stages wait for each other."
    for run, calibrated_s in zip(runs, calibrated.step_times_s, strict=True):
        times = ((run.predicted_s, "predicted"), (run.step_time_s, "measured"), (calibrated_s, "calibrated"))
        rates = ", ".join(f"{origin} {1 / step_s:.4g}" for step_s, origin in times if step_s > 0)
        yield f"{run.plan.config}, microbatches/s: {rates}"
