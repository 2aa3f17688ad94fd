"""The Python API, which names things as the command line does. `import pipeplan` has all of these names.

    profile = pipeplan.profile("my_model.py:build")
    outcome = pipeplan.solve(profile, pipeplan.cluster("local", workers=3))
    print(outcome.plan.config, outcome.objective_s)
    pipeplan.render(outcome, "plan")

Errors in a file, a name or an option raise `PipeplanError`, whose message is one line. An unknown keyword of a function
that takes no options raises Python's own `TypeError`. Only `profile` needs torch. Nothing here prints.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.local import local_cluster
from pipeplan.cluster_data.machine_costs import with_machine_costs
from pipeplan.cost.throughput import RunSize
from pipeplan.errors import DisagreementError, InfeasibleError, InputError, NotFoundInTimeError, PipeplanError
from pipeplan.exports.target import export_files, export_target, write_export
from pipeplan.from_options.build_problem import build_problem
from pipeplan.from_options.option_fields import OptionKeywords, checked_keywords
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.choose_synchrony import GAIN, RATE
from pipeplan.planning.fewest_workers import search_fewest_workers
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.progress import SolveProgress
from pipeplan.planning.settings import Settings
from pipeplan.planning.simplest import WITHIN
from pipeplan.planning.solve import solve as solve_problem
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data import bundled
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import HALVINGS
from pipeplan.profiler.torch_version import check_torch
from pipeplan.questions import explain, replan, sweep
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launchers import launcher_by_name
from pipeplan.rendering.plan_json import plan_document
from pipeplan.simulation import scenario
from pipeplan.simulation.message_order import check_transport
from pipeplan.simulation.simulate import Simulated
from pipeplan.simulation.simulate import simulate as simulate_scenario
from pipeplan.util.deadline import Deadline
from pipeplan.util.files import Node

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
    batch: int | Sequence[int] | None = None,
    halvings: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    granularity: str = "layer",
    repeats: int | None = None,
    processes: int = 1,
    load: bool = True,
    measure_all: bool = False,
    self_check: bool = True,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, step: None,
) -> Profile:
    """Measure the cost of each layer of a model on this machine, or estimate it for a device.

    `model` is a bundled name, `path/to/file.py:callable`, `package.module:callable`, or such a callable itself: a
    function defined in a file or module that takes no arguments and returns an `nn.Module` or a `pipeplan_launch.Job`.
    `batch` is in samples; of several sizes the first is the profile's own, and these alone are measured. Of one size
    its `halvings` (by default 3, down to an eighth) are measured as well, briefly. `device` is `cpu`, `cuda`, or a
    device to estimate for: `v100`, `a100`, a TOML file. `granularity` is `module`, `layer` or `op`. Before
    measuring, the model is compared with its stages in two training steps, unless `self_check` is false. `progress` is
    called with the steps done, the steps in all (0: not known) and the next step. `Profile.save(path)` writes the
    result. Raises `InputError`, also if torch is missing.
    """
    check_torch()
    from pipeplan.profiler.options import ProfilerOptions
    from pipeplan.profiler.profiler import profile_model

    sizes = () if batch is None else (batch,) if isinstance(batch, int) else tuple(batch)
    measuring = ProfilerOptions(
        batches=sizes,
        halvings=halvings if halvings is not None else HALVINGS if len(sizes) <= 1 else 0,
        device=device,
        threads=threads,
        repeats=repeats,
        seed=seed,
        granularity=granularity,
        processes=processes,
        load=load,
        measure_all=measure_all,
        self_check=self_check,
    )
    return profile_model(model if isinstance(model, str) else _reference(model), measuring, progress)


def read_profile(name: str | os.PathLike[str]) -> Profile:
    """Read the profile in a file, or the bundled one of that name, such as `vgg16-v100`. Raises `InputError`."""
    return bundled.load_profile(os.fspath(name))


def cluster(
    name: str | os.PathLike[str] = "local", *, servers: int | None = None, workers: int | None = None
) -> Cluster:
    """A cluster: `A`, `B` or `C` of PipeDream's paper, a TOML file, or `local`, which is this machine.

    `servers` replaces the cluster's number of servers, and `workers` the number of workers of `local`. Raises
    `InputError`.
    """
    name = os.fspath(name)
    if name == "local":
        if servers not in (None, 1):
            raise InputError("the cluster local is one server: leave out --servers, or give --workers")
        return with_machine_costs(local_cluster(workers))
    if workers is not None:
        raise InputError("--workers goes with --cluster local; for other clusters give --servers")
    loaded = cluster_toml.load_cluster(name)
    return loaded if servers is None else loaded.with_servers(servers)


def solve(
    profile: Profile,
    cluster: Cluster,
    *,
    settings: Settings | None = None,
    minibatch: int | Literal["auto"] | None = None,
    batch: int | None = None,
    staleness: str | None = None,
    asynchronous_gain: float = GAIN,
    objective: str = RATE,
    target: str | None = None,
    server_order: str = "any",
    fewest_workers_within: float | None = None,
    simplest: float = WITHIN,
    epochs: int | None = None,
    dataset_size: int | None = None,
    tokens_per_sample: int | None = None,
    progress: Callable[[SolveProgress], None] | None = None,
    **options: Unpack[OptionKeywords],
) -> Outcome:
    """Find the best plan of a profile on a cluster, with its proof and its gain over data parallelism.

    `options` are the fields of `Options`: constraints on the plan, and choices of the cost model; also `straight`,
    `ignore_memory`, `no_recompute`, `no_contention`, and `pin="conv1=1"`, as on the command line. If the overlap is not
    given, it is 1 on GPUs and 0 on CPUs. `settings` selects the solvers and says when they stop.
    Further choices:

    `schedule="auto"` takes the best schedule for a global `batch`, in samples per update, whose weights are at most as
    old as `staleness` allows (`none`, `bounded`, `any`). `minibatch="auto"` takes the best of the sizes in the profile.
    `schedule="best"`, the default of training, takes the synchronous plan unless an asynchronous one has more samples
    per second by the share `asynchronous_gain`, and gradients at most 3 updates old unless `staleness` is `any`;
    the `objective` `time-to-goal` divides rates by the measured cost in samples to the goal (docs/learning.md);
    `outcome.synchrony` has the best of both kinds. The simplest plan within the share `simplest` of the fastest is
    taken, with the fastest in `outcome.simplification`; 0 takes that.
    A `target`, such as `megatron`, restricts plans to those that this trainer can express; `export` writes its
    files. Servers that differ are put in the best order, which `outcome.problem.cluster` has then, unless
    `server_order="listed"`. `fewest_workers_within=0.05` uses as few workers as come within 5% of the best pace.

    `outcome.throughput` has samples and tokens per second, the share of the peak, prices, and the time of `epochs` over
    `dataset_size` samples of `tokens_per_sample`, by default those of the profile, as far as all this is known.

    `progress` is called whenever the phase, the best plan or the bound changes. The search ends with the best plan so
    far after `settings.time_limit_s` seconds, or at Ctrl-C.

    The pace to expect is `outcome.predicted_s`, in seconds per minibatch: simulated where that differs from
    `outcome.objective_s`, the pace by the formulas, which the proof is about. `outcome.verdict.proven` says whether two
    solvers, or a reason that needs none, show that no plan of the searched space is faster, with everything charged;
    `outcome.gap` is by how much one could be. Raises `InputError`, `InfeasibleError` if no plan fits,
    `NotFoundInTimeError` if none was found in time, and
    `DisagreementError` if the two solvers contradict each other, which is a defect of pipeplan.
    """
    if not isinstance(profile, Profile):
        raise InputError(f"solve takes a profile, as pipeplan.read_profile({str(profile)!r}) reads one")
    if not isinstance(cluster, Cluster):
        raise InputError(f"solve takes a cluster, as pipeplan.cluster({str(cluster)!r}) is one")
    if not 0 <= simplest <= 1:
        raise InputError(f"the share by which the simplest plan may be slower lies between 0 and 1, not {simplest:g}")
    settings = replace(settings or Settings(), simplest=simplest)
    size = RunSize(epochs, dataset_size, tokens_per_sample)
    size.check(profile, inference=bool(options.get("inference")))
    deadline = Deadline.after(settings.time_limit_s)
    built = build_problem(
        profile,
        cluster,
        minibatch=minibatch,
        batch=batch,
        staleness=staleness,
        asynchronous_gain=asynchronous_gain,
        objective=objective,
        target=target,
        server_order=server_order,
        maximum_cuts=settings.maximum_cuts,
        deadline=deadline,
        simplest=simplest,
        simulate=settings.simulate,
        **checked_keywords(options),
    )
    if fewest_workers_within is not None:
        outcome = search_fewest_workers(
            built.problem, fewest_workers_within, settings, report=progress, deadline=deadline
        ).outcome
    else:
        outcome = solve_problem(built.problem, settings, report=progress, deadline=deadline, known=built.known)
    return replace(outcome, synchrony=built.synchrony, run_size=size)


def simulate(
    plan: Outcome | str | os.PathLike[str], minibatches: int | None = None, *, transport: str = "gloo"
) -> Simulated:
    """Replay a plan, given as an outcome or a folder, in simulated time, with the schedule that the executor runs.

    The default number of `minibatches` is enough for a steady state. The result's `report` holds the pace and more.
    With the `transport` `nccl`, messages keep the one order that launch.sh's `--transport` has.
    Raises `InputError` if the folder holds no valid plan.
    """
    check_transport(transport)
    if isinstance(plan, Outcome):
        played = scenario.scenario_from_document(Node(plan_document(plan), "plan.json"))
    else:
        played = scenario.read_scenario(Path(plan))
    return simulate_scenario(replace(played, transport=transport), minibatches)


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

    The script lies in the plan folder unless `output` names another file. `settings` are the options that
    `pipeplan render KIND --help` lists, such as `partition="gpu"`. Raises `InputError`.
    """
    plan, launcher = Path(folder), launcher_by_name(kind)
    path = plan_folder.launch_file_path(plan, launcher, None, None if output is None else Path(output))
    text = plan_folder.launch_file_text(
        plan, launcher, settings, output=path, command=f"pipeplan.render_launcher({kind!r})"
    )
    plan_folder.write_launch_file(path, text, launcher, force=force)
    return path


def export(target: str, outcome: Outcome, folder: str | os.PathLike[str] | None = None, *, force: bool = False) -> Path:
    """Export a plan for another trainer. Returns the folder of its files, by default `plan/TARGET`.

    `target` is `torch-pipelining`, `torchtitan`, `megatron` or `deepspeed`. Either all files are written or none.
    Raises `InputError` for a plan that the trainer cannot express; `solve(..., target=...)` finds the best that it can.
    """
    output = Path("plan") / target if folder is None else Path(folder)
    files = export_files(export_target(target), outcome.problem, outcome.plan)
    write_export(output, files, force=force)
    return output


def _reference(build: Callable[[], object]) -> str:
    """A reference to a function by its file and name, with which other processes can load it."""
    name, module = getattr(build, "__qualname__", ""), inspect.getmodule(build)
    source = getattr(module, "__file__", None)
    if source is None or not name.isidentifier():
        raise InputError(
            f"{name or build!r} is not a function of a file, so that no worker could load it: give file.py:function"
        )
    return f"{source}:{name}"
