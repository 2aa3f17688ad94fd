"""The Python API, with the same names as the command line. `import pipeplan` provides all of these names.

    profile = pipeplan.profile("my_model.py:build")
    outcome = pipeplan.solve(profile, pipeplan.cluster("local", workers=3))
    print(outcome.plan.config, outcome.objective_s)
    pipeplan.render(outcome, "plan")

Errors in a file, a name or an option raise `PipeplanError`, whose message is one line. An unknown keyword of a function
that takes no options raises Python's own `TypeError`. Only `profile` needs torch. No function prints.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.local import local_cluster
from pipeplan.cluster_data.machine_costs import with_machine_costs
from pipeplan.cost.throughput import RunSize
from pipeplan.errors import DisagreementError, InfeasibleError, InputError, NotFoundInTimeError, PipeplanError
from pipeplan.exports.target import export_files, export_target, write_export
from pipeplan.from_options.build_problem import Request, build_problem
from pipeplan.from_options.option_fields import OptionKeywords, checked_keywords
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings, SolveProgress
from pipeplan.planning.solve import solve as solve_problem
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile, load_profile
from pipeplan.profile_data.rescale import HALVINGS
from pipeplan.profiler.options import check_torch
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launchers import launcher_by_name
from pipeplan.rendering.plan_json import plan_document
from pipeplan.simulation import scenario
from pipeplan.simulation.simulate import Simulated
from pipeplan.simulation.simulate import simulate as simulate_scenario
from pipeplan.util.deadline import Deadline
from pipeplan.util.files import Node

if TYPE_CHECKING:
    from pipeplan.questions import explain, replan, sweep
else:

    def __getattr__(name: str) -> Any:
        """Import `explain`, `sweep` and `replan` on first use, because a solve does not need their modules."""
        if name not in ("explain", "replan", "sweep"):
            raise AttributeError(f"module 'pipeplan.api' has no attribute {name!r}")
        return getattr(importlib.import_module("pipeplan.questions"), name)


__all__ = [
    "Cluster",
    "DisagreementError",
    "InfeasibleError",
    "InputError",
    "NotFoundInTimeError",
    "Options",
    "Outcome",
    "PipeplanError",
    "Plan",
    "Problem",
    "Profile",
    "Settings",
    "Simulated",
    "SolveProgress",
    "Stage",
    "cluster",
    "explain",
    "export",
    "profile",
    "read_profile",
    "render",
    "render_launcher",
    "replan",
    "simulate",
    "solve",
    "sweep",
]


def profile(
    model: str | Callable[[], object],
    *,
    microbatch: int | Sequence[int] | None = None,
    halvings: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    granularity: str = "layer",
    repeats: int | None = None,
    self_check: bool = True,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, step: None,
) -> Profile:
    """Measure the cost of each layer of a model on this machine, or estimate it for a device.

    `model` is a bundled name, `path/to/file.py:callable`, `package.module:callable`, or such a callable itself: a
    function defined in a file or module that takes no arguments and returns an `nn.Module` or a `pipeplan_launch.Job`.
    `microbatch` is in samples. A list of sizes is measured completely, and the first becomes the profile's own
    size. With a single size, its `halvings` (by default 3, down to an eighth) are also measured, briefly. `device` is
    `cpu`, `cuda`, or a device to estimate for: `v100`, `a100`, a TOML file. `granularity` is `module`, `layer` or `op`.
    Before measuring, the model is compared with its stages in two training steps, unless `self_check` is false.
    `progress` is called with the number of steps done, the total number (0 if unknown) and the name of the next step.
    `Profile.save(path)` writes the result. Raises `InputError`, also if torch is missing.
    """
    check_torch()
    from pipeplan.profiler.options import ProfilerOptions
    from pipeplan.profiler.profiler import profile_model

    sizes = () if microbatch is None else (microbatch,) if isinstance(microbatch, int) else tuple(microbatch)
    measuring = ProfilerOptions(
        batches=sizes,
        halvings=halvings if halvings is not None else HALVINGS if len(sizes) <= 1 else 0,
        device=device,
        threads=threads,
        repeats=repeats,
        seed=seed,
        granularity=granularity,
        load=True,
        self_check=self_check,
    )
    return profile_model(model if isinstance(model, str) else _reference(model), measuring, progress)


def read_profile(name: str | os.PathLike[str]) -> Profile:
    """Read the profile in a file, or the bundled profile of that name, such as `vgg16-v100`. Raises `InputError`."""
    return load_profile(os.fspath(name))


def cluster(
    name: str | os.PathLike[str] = "local", *, servers: int | None = None, workers: int | None = None
) -> Cluster:
    """A cluster: `A`, `B` or `C` of PipeDream's paper, a TOML file, or `local`, which is this machine.

    `servers` replaces the cluster's number of servers, and `workers` the number of workers of a cluster of one
    server. Raises `InputError`.
    """
    name = os.fspath(name)
    if name == "local":
        if servers not in (None, 1):
            raise InputError("the cluster local is one server: leave out --servers, or give --workers")
        return with_machine_costs(local_cluster(workers))
    loaded = cluster_toml.load_cluster(name)
    if workers is not None:
        loaded = loaded.with_workers(workers)
    return loaded if servers is None else loaded.with_servers(servers)


def solve(
    profile: Profile,
    cluster: Cluster,
    *,
    settings: Settings | None = None,
    batch: int | None = None,
    microbatch: int | None = None,
    staleness: float | None = None,
    target: str | None = None,
    epochs: int | None = None,
    dataset_size: int | None = None,
    tokens_per_sample: int | None = None,
    progress: Callable[[SolveProgress], None] | None = None,
    **options: Unpack[OptionKeywords],
) -> Outcome:
    """Find the best plan of a profile on a cluster, a bound on how good it is, and its gain over data parallelism.

    `batch` is the global batch in samples, by default one microbatch on every worker. `microbatch` is the size of a
    microbatch in samples, by default the best of the profile's sizes. `staleness` is the largest allowed age of
    gradients in updates, by default 0; `math.inf` allows any age. Every candidate trains the same global batch, and the
    simplest plan within 3% of the fastest is taken. `outcome.choice` has the best plan of every kind.

    `options` are the fields of `Options`: constraints on the plan, and choices of the cost model. Other options are
    `ignore_memory`, `no_recompute`, `no_contention`, and `pin="conv1=1"`, as on the command line. A `schedule` among
    them replaces the choice. If the overlap is not given, it is 1 on GPUs and 0 on CPUs. `settings` selects the solvers
    and their limits.

    A `target`, such as `megatron`, restricts plans to those that this trainer can express; `export` writes the
    trainer's files. Servers that differ are put into the best order; `outcome.problem.cluster` has this order.

    `outcome.throughput` has samples and tokens per second, the share of the peak, prices, and the time of `epochs`
    epochs, as far as they are known. `dataset_size` (samples of an epoch) and `tokens_per_sample` are by default those
    of the profile.

    `progress` is called whenever the phase, the best plan or the bound changes. The search ends with the best plan so
    far after `settings.time_limit_s` seconds, or at Ctrl-C.

    The figure of the plan is `outcome.predicted_s`, its simulated step time in seconds per microbatch.
    `outcome.bound_s` is a lower bound for all plans of the searched space. `outcome.gap` says how much faster another
    plan could be, and `outcome.verdict.proven` whether two solvers show this. Raises `InputError`, `InfeasibleError` if
    no plan fits, `NotFoundInTimeError` if none was found in time, and `DisagreementError` if the two solvers contradict
    each other, which is a defect of pipeplan.
    """
    if not isinstance(profile, Profile):
        raise InputError(f"solve takes a profile, as pipeplan.read_profile({str(profile)!r}) reads one")
    if not isinstance(cluster, Cluster):
        raise InputError(f"solve takes a cluster, as pipeplan.cluster({str(cluster)!r}) is one")
    settings = replace(settings or Settings(), simplify=True)
    size = RunSize(epochs, dataset_size, tokens_per_sample)
    size.check(profile, inference=bool(options.get("inference")))
    deadline = Deadline.after(settings.time_limit_s)
    request = Request(
        profile,
        cluster,
        batch,
        microbatch,
        staleness,
        target,
        checked_keywords(options),
        settings.maximum_cuts,
        deadline,
        settings.simulate,
    )
    built = build_problem(request)
    found = built.problem, settings
    outcome = solve_problem(*found, report=progress, deadline=deadline, known=built.known, choice=built.choice)
    return replace(outcome, run_size=size)


def simulate(plan: Outcome | str | os.PathLike[str], microbatches: int | None = None) -> Simulated:
    """Replay a plan, given as an outcome or a folder, in simulated time, with the schedule that the executor runs.

    The default number of `microbatches` is enough for a steady state. The result's `report` has the step time and other
    figures. Raises `InputError` if the folder has no valid plan.
    """
    if isinstance(plan, Outcome):
        played = scenario.scenario_from_document(Node(plan_document(plan), "plan.json"))
    else:
        played = scenario.read_scenario(Path(plan))
    return simulate_scenario(played, microbatches)


def render(outcome: Outcome, folder: str | os.PathLike[str] = "plan", *, force: bool = False) -> Path:
    """Write a plan folder with plan.json, stages/ and launch.sh, which runs the plan. Returns the folder.

    Either all files are written or none. `force` replaces an existing plan. Raises `InputError`.
    """
    plan_folder.write_plan(outcome, Path(folder), force=force)
    return Path(folder)


def render_launcher(
    kind: str,
    folder: str | os.PathLike[str] = "plan",
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    **settings: object,
) -> Path:
    """Render a script that launches the plan of a folder: `ssh`, `slurm`, `kubernetes`, `torchrun`. Returns its path.

    The script is written into the plan folder unless `output` names another file. `settings` are the options that
    `pipeplan export TARGET --help` lists, such as `partition="gpu"`. Raises `InputError`.
    """
    plan, launcher = Path(folder), launcher_by_name(kind)
    path, command = None if output is None else Path(output), f"pipeplan.render_launcher({kind!r})"
    return plan_folder.write_launch_file(plan, launcher, settings, output=path, command=command, force=force)


def export(target: str, outcome: Outcome, folder: str | os.PathLike[str] | None = None, *, force: bool = False) -> Path:
    """Export a plan for another trainer. Returns the folder of its files, by default `plan/TARGET`.

    `target` is `torch-pipelining`, `torchtitan`, `megatron`, `deepspeed` or `diffusion-pipe`. Either all files are
    written or none. Raises `InputError` for a plan that the trainer cannot express; `solve(..., target=...)` finds the
    best plan that it can express.
    """
    output = Path("plan") / target if folder is None else Path(folder)
    files = export_files(export_target(target), outcome.problem, outcome.plan)
    write_export(output, files, force=force)
    return output


def _reference(build: Callable[[], object]) -> str:
    """A reference to a function by its file and name, so that other processes can load it."""
    name, module = getattr(build, "__qualname__", ""), inspect.getmodule(build)
    source = getattr(module, "__file__", None)
    if source is None or not name.isidentifier():
        raise InputError(
            f"{name or build!r} is not a function of a file, so that no worker could load it: give file.py:function"
        )
    return f"{source}:{name}"
