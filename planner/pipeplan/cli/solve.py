"""`pipeplan solve`: from a profile and a cluster to a plan folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from pipeplan import cluster as clusters
from pipeplan import render, resources
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.local import local
from pipeplan.problem import Options, Problem
from pipeplan.profile import Profile
from pipeplan.show import show
from pipeplan.solve import Disagreement, Settings, solve
from pipeplan.text import one_line

DEFAULT_PROFILE = Path("profile.json")
BUNDLED_PROFILE = "vgg16-v100.json"


@dataclass(frozen=True)
class _Source:
    """Where the profile came from, and what was done to it."""

    profile: Profile
    text: str


@click.command("solve")
@click.argument("profile", required=False, type=click.Path(path_type=Path))
@click.option("--cluster", "cluster_name", default="local", show_default=True, help="A, B, C, local, or a TOML file.")
@click.option("--servers", type=int, help="Another number of servers than the cluster's own.")
@click.option("--workers", type=int, help="With --cluster local: how many workers.")
@click.option("--minibatch", type=int, help="Rescale the profile to another minibatch size, linearly.")
@click.option("--inference", is_flag=True, help="Plan the forward pass only.")
@click.option("--stages", type=int, help="Exactly so many stages.")
@click.option("--max-replicas", type=int, help="No stage on more workers; 1 makes the pipeline straight.")
@click.option("--overlap", type=float, help="Share of gradient sync hidden by compute  [default: 1 on GPUs, 0 on CPUs]")
@click.option("--ignore-memory", is_flag=True, help="Plan as if memory had no end.")
@click.option("--solver", type=click.Choice(["dp", "ilp", "both"]), default="both", show_default=True)
@click.option("--ilp-solver", type=click.Choice(["highs", "cbc"]), default="highs", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds for the ILP.")
@click.option(
    "--cost-model",
    type=click.Choice(["pipeplan", "pipedream-code", "pipedream-paper"]),
    default="pipeplan",
    show_default=True,
    help="The published variants are for comparing figures.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("plan"), show_default=True)
@click.option("--force", is_flag=True, help="Replace a plan that is already in the output folder.")
@click.option("--no-write", is_flag=True, help="Print the answer only.")
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the table.")
def command(
    profile: Path | None,
    cluster_name: str,
    servers: int | None,
    workers: int | None,
    minibatch: int | None,
    inference: bool,
    stages: int | None,
    max_replicas: int | None,
    overlap: float | None,
    ignore_memory: bool,
    solver: str,
    ilp_solver: str,
    time_limit: float,
    cost_model: str,
    output: Path,
    force: bool,
    no_write: bool,
    as_json: bool,
) -> None:
    """Find the best plan for a profile on a cluster, prove it, and write it to a folder.

    PROFILE defaults to ./profile.json, else to a bundled VGG-16 on V100.

    \b
    pipeplan solve --cluster B
    pipeplan solve profile.json --cluster local --workers 3
    pipeplan solve profile.json --cluster my-cluster.toml --json --no-write
    """
    if not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds, not {time_limit:g}")
    if not no_write:
        render.refuse_to_overwrite(output, force)
    source = _read(profile, minibatch)
    cluster = _cluster(cluster_name, servers, workers)
    if overlap is None:
        # On CPUs the cores that compute also move the data, so that nothing hides behind anything.
        overlap = 1.0 if cluster.device.kind == "cuda" else 0.0
    options = Options(
        inference=inference, overlap=overlap, memory=not ignore_memory, stages=stages, max_replicas=max_replicas
    )
    problem = Problem(source.profile, cluster, options)
    settings = Settings(solver=solver, cost_model=cost_model, backend=ilp_solver, time_limit_s=time_limit)
    notes = Console(stderr=True, highlight=False)
    notes.print(source.text, style="dim", markup=False, soft_wrap=True)
    try:
        outcome = solve(problem, settings)
    except Disagreement as error:
        if no_write:
            raise
        written = render.write_disagreement(error.results, output)
        places = " and ".join(str(path) for path in written)
        raise Disagreement(f"{error}; both plans are in {places}", error.results) from None
    if not no_write:
        # Before the table: whoever closes our output early, as `| head` does, still has the plan.
        render.write_plan(outcome, output, force=force)
    if as_json:
        click.echo(json.dumps(render.plan_document(outcome), indent=1, allow_nan=False))
    else:
        show(outcome, Console(highlight=False))
    if not no_write:
        runnable = "" if source.profile.model_ref else " (its profile names no model that could be run)"
        notes.print(f"written: {output}/plan.json, stages/, launch.sh{runnable}", markup=False, soft_wrap=True)


def _read(path: Path | None, minibatch: int | None) -> _Source:
    if path is None and DEFAULT_PROFILE.exists():
        path, why = DEFAULT_PROFILE, "profile.json in this folder"
    elif path is None:
        path, why = resources.folder("profiles") / BUNDLED_PROFILE, "bundled, as there is no profile.json here"
    else:
        why = str(path)
    profile = Profile.load(path)
    origin = profile.provenance
    text = f"profile: {profile.model_name} ({why}); {origin.kind} on {origin.device_name or 'an unnamed device'}"
    if origin.kind == "modelled":
        text += ", not measured"
    if minibatch is not None and minibatch != profile.minibatch:
        text += f"; rescaled linearly from minibatch {profile.minibatch} to {minibatch}"
        profile = profile.rescaled(minibatch)
    return _Source(profile, one_line(text))


def _cluster(name: str, servers: int | None, workers: int | None) -> Cluster:
    if name == "local":
        if servers not in (None, 1):
            raise InputError("the cluster local is one server: leave out --servers, or give --workers")
        return local(workers)
    if workers is not None:
        raise InputError("--workers goes with --cluster local; for other clusters give --servers")
    found = clusters.load(name)
    return found if servers is None else found.with_servers(servers)
