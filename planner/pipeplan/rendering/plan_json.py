"""The contents of a plan folder's files: plan.json for people and tools, stages/*.json for the executor.

Stage files contain the link rates that the plan was made for. The executor compares these rates with measured rates.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeplan._version import __version__
from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.evaluate import exposed_allreduce_per_minibatch_s, idle_per_minibatch_s
from pipeplan.cost.flush import BatchTime
from pipeplan.plan.learning_cost import known_learning
from pipeplan.plan.schedules import INFERENCE
from pipeplan.plan.updates import Updates
from pipeplan.planning.baselines import not_taken_because
from pipeplan.problem.options import Sharding
from pipeplan.problem.plan_file import PLAN_FORMAT
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.profile_document import located_fields
from pipeplan.simulation.from_plan import stage_figures

if TYPE_CHECKING:
    from pipeplan.planning.baselines import Baseline
    from pipeplan.planning.outcome import Outcome
    from pipeplan.solvers.result import Result

STAGE_FORMAT, FORMAT_VERSION = "pipeplan-stage", 1
UNWRITTEN_DEFAULTS = {"correction": "none", "virtual_stages": None, "sharding": Sharding.NONE, "unequal_shares": False}
"""Options that plan.json omits if they have these values."""


def plan_document(outcome: Outcome, folder: Path | None = None) -> dict[str, Any]:
    """The contents of plan.json, which `solve --json` also prints.

    `folder` is the plan folder, to which the paths in plan.json are relative; None for a plan that is not written.
    """
    profile, score = outcome.problem.profile, outcome.evaluation
    return {
        "format": PLAN_FORMAT,
        "version": FORMAT_VERSION,
        "pipeplan": __version__,
        "profile": {
            "digest": profile.digest(),
            "path": profile.file or None,
            **_relative_path(profile, folder),
            "model": profile.model_name,
            **_model_fields(profile, folder),
            "minibatch": profile.minibatch,
            "threads": profile.provenance.threads,
            **({"processes": profile.provenance.processes} if profile.provenance.processes > 1 else {}),
            "kind": profile.provenance.kind,
            "how": profile.provenance.how,
        },
        "cluster": outcome.problem.cluster.to_json() | {"digest": outcome.problem.cluster.digest()},
        "options": _options(outcome),
        "plan": outcome.plan.to_json() | {"config": outcome.plan.config},
        "data_parallel": outcome.problem.options.data_parallel(outcome.plan),
        "updates": None if outcome.plan.inference else _updates(outcome),
        "choice": None if outcome.choice is None else outcome.choice.to_json(),
        "stated": {
            "minibatch_s": outcome.predicted_s,
            "minibatches_per_s": 1 / outcome.predicted_s if outcome.predicted_s > 0 else math.inf,
            "simulated": outcome.figure.simulated_s is not None,
        },
        "prediction": {
            "minibatch_s": score.step_time_s,
            "minibatches_per_s": score.rate,
            "bound_by": score.bound,
            "copies_synchronisation_s": score.copies_s,
            "batch": None if score.batch is None else _batch(score.batch),
            "stages": _stage_predictions(outcome),
        },
        "throughput": outcome.throughput.to_json(),
        "simulation": {
            "minibatch_s": outcome.figure.simulated_s,
            "ratio": outcome.figure.ratio,
            "minibatches": outcome.figure.minibatches,
            "note": outcome.figure.note,
        },
        "baselines": [_baseline(baseline, outcome) for baseline in outcome.baselines],
        "verdict": {
            "agree": outcome.verdict.agree,
            "proven": outcome.verdict.proven,
            "text": outcome.verdict.text,
            "solvers": [result_document(result) for result in outcome.results],
        },
        "status": str(outcome.status),
        "bound_s": outcome.bound_s,
        "gap": _finite(outcome.gap),
        "certificate": outcome.certificate.document,
        "certificate_note": outcome.certificate.note,
        "seconds": outcome.phases_s,
    }


def _updates(outcome: Outcome) -> dict[str, Any]:
    """The fields on updates of the stages, and, for an asynchronous plan, the measured cost of learning."""
    profile, correction = outcome.problem.profile, outcome.problem.options.correction
    known = known_learning(outcome.plan, profile.optimizer_name, profile.optimizer_state_ratio, correction)
    updates = Updates.of(outcome.plan, profile.minibatch).to_json()
    return updates | ({} if known is None else {"learning": known.to_json()})


def _options(outcome: Outcome) -> dict[str, Any]:
    """The options of the user. The schedule and the minibatches per update are those of the plan."""
    options = asdict(outcome.problem.options)
    for name, default in UNWRITTEN_DEFAULTS.items():
        if options[name] == default:
            del options[name]
    return options | {"schedule": outcome.plan.schedule, "accumulate": outcome.plan.accumulate}


def _baseline(baseline: Baseline, outcome: Outcome) -> dict[str, Any]:
    """The fields of a baseline. `not_taken` is included if it is faster than the plan and not in the searched space."""
    why = not_taken_because(baseline, outcome.plan, outcome.predicted_s, outcome.problem)
    return {
        "name": baseline.name,
        "config": baseline.config,
        "minibatch_s": baseline.step_time_s,
        "step_s": baseline.step_s,
        "gain": baseline.gain(outcome.predicted_s),
        "remark": baseline.remark,
        **({"not_taken": why} if why else {}),
        "plan": None if baseline.plan is None else baseline.plan.to_json(),
    }


def result_document(result: Result) -> dict[str, Any]:
    """The answer of one solver, as JSON."""
    return {
        "solver": result.solver,
        "status": str(result.status),
        "config": result.plan.config if result.plan else None,
        "minibatch_s": _finite(result.objective_s),
        "bound_s": _finite(result.bound_s),
        "charged": result.charged,
        "gap": _finite(result.gap),
        "seconds": result.seconds,
        "note": result.note,
    }


def _model_fields(profile: Profile, folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {"ref": profile.model_ref}
    return located_fields(profile.model_ref, profile.model_file, folder)


def _relative_path(profile: Profile, folder: Path | None) -> dict[str, str]:
    """The path of the profile from the plan folder; empty if the profile was made in memory or is bundled."""
    if folder is None or not profile.file:
        return {}
    return {"relative_path": os.path.relpath(os.path.realpath(profile.file), folder.resolve())}


def stage_documents(outcome: Outcome, folder: Path | None = None) -> list[dict[str, Any]]:
    """The contents of the stage files. Each has everything that a worker of the stage needs to know.

    `folder` is the plan folder, to which the path of the job is relative; None for a plan that is not written. Servers
    after the last server with a busy worker are left out, because nothing is started there.
    """
    problem, plan = outcome.problem, outcome.plan
    profile, cluster = problem.profile, problem.cluster
    sizes = cluster.server_sizes[: cluster.servers_up_to(worker for stage in plan.stages for worker in stage.workers)]
    names = [device.name for device in cluster.devices]
    mixed = any(len({machine.device for machine in machines}) > 1 for machines in cluster.server_machines)
    shared = {
        "format": STAGE_FORMAT,
        "version": FORMAT_VERSION,
        "plan": plan.digest(profile.digest(), cluster.digest()),
        "mode": "inference" if plan.inference else "training",
        "model": {
            **_model_fields(profile, folder),
            "graph_hash": profile.graph_hash or None,
            "granularity": profile.granularity,
            **({"taken_whole": list(profile.taken_whole)} if profile.taken_whole else {}),
        },
        "minibatch": profile.minibatch,
        "profile": profile.provenance.kind,
        "device": cluster.device.kind,
        "servers": len(sizes),
        "workers_per_server": max(sizes),
        **({"server_sizes": list(sizes)} if len(set(sizes)) > 1 else {}),
        **({"device_names": names[: sum(sizes)]} if mixed else {}),
        "schedule": {"name": INFERENCE if plan.inference else plan.schedule, "accumulate": plan.accumulate}
        | ({} if problem.options.correction == "none" else {"correction": problem.options.correction}),
        "pipeline": [
            {name: value for name, value in stage.items() if name != "layers"} for stage in plan.to_json()["stages"]
        ],
        "links": planned_links(outcome, sum(sizes)),
        "data_parallel": problem.options.data_parallel(plan),
        **({"shard_optimizer": True} if problem.options.shard_optimizer else {}),
    }
    return [
        shared
        | {"stage": index, "layers": list(stage.layers)}
        | {"prediction": prediction | _worker_prediction(outcome, index, prediction)}
        for index, (stage, prediction) in enumerate(zip(plan.stages, _stage_predictions(outcome), strict=True))
    ]


def _batch(batch: BatchTime) -> dict[str, Any]:
    """The parts of a batch. `order_s`, which few plans have, is included only if it is not 0."""
    parts = asdict(batch)
    return {key: value for key, value in parts.items() if value or key != "order_s"}


def _stage_predictions(outcome: Outcome) -> list[dict[str, Any]]:
    """Predictions for all stages, per minibatch on one replica, which the executor compares with its measurements."""
    worker_bytes = round(outcome.problem.cluster.executor.worker_bytes)
    return [
        {
            "minibatch_s": outcome.evaluation.step_time_s,
            **{
                name: value
                for name, value in asdict(stage).items()
                if value is not None and (value or name not in ("weights_s", "split_s", "executor_s"))
            },
            **({"worker_bytes": worker_bytes} if worker_bytes else {}),
        }
        for stage in stage_figures(outcome.plan, outcome.problem, outcome.evaluation)
    ]


def _worker_prediction(outcome: Outcome, index: int, stage: dict[str, Any]) -> dict[str, Any]:
    """Further predictions per minibatch for a worker of the stage, at the step time of the answer."""
    plan, cluster = outcome.plan, outcome.problem.cluster
    # The executor's table compares a run with the answer's step time. Waiting is the rest of that time.
    score = replace(outcome.evaluation, step_time_s=outcome.predicted_s)
    shared = (cores for first, stop, cores in cluster.shared_cores if first <= plan.stages[index].workers[0] < stop)
    return {
        "minibatch_s": score.step_time_s,
        "backward_s": stage["backward_s"] + stage.get("split_s", 0.0),
        "exposed_s": exposed_allreduce_per_minibatch_s(plan, outcome.problem, score, index),
        "wait_s": idle_per_minibatch_s(plan, outcome.problem, score, index),
        "boundary_s": score.stages[index].boundary_s / plan.copies,
        "cores": next(shared, 0),
    }


def planned_links(outcome: Outcome, workers: int) -> list[dict[str, Any]]:
    """The levels of the cluster, innermost first: components, rates, and how long the plan keeps network cards busy.

    Only the first `workers` workers count. `span` is the number of components that each component of the level joins.
    `sendrecv` and `allreduce` are in bytes per second, null if unlimited. `cards_s` is in seconds per minibatch for one
    network card. If the components of a level differ, a value is a list with an entry for each component.
    """
    problem = outcome.problem
    cluster, links = problem.cluster, Links.of(problem.cluster)
    busy = contention.card_loads(outcome.plan, problem, links).busy_s
    documents = []
    for number, level in enumerate(cluster.levels, start=1):
        rates = links.rates[number]
        starts = [start for start in cluster.starts(number) if start < workers]
        shown = len(starts)
        # Network cards belong to the components that a level joins: servers, and groups of servers.
        cards = busy[number - 1].max(axis=0).tolist() if number > cluster.server_level else None
        documents.append(
            {
                "name": level.name,
                "span": _one_or_all(np.diff(np.array([*starts, workers])).tolist()),
                "sendrecv": _one_or_all([_finite(rate) for rate in rates.sendrecv.tolist()[:shown]]),
                "allreduce": _one_or_all([_finite(rate) for rate in rates.allreduce.tolist()[:shown]]),
                "latency_s": _one_or_all(rates.latency.tolist()[:shown]),
                "cards_s": None if cards is None else _one_or_all(cards),
            }
        )
    return documents


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _one_or_all(values: list[Any]) -> Any:
    """The common value if all values are equal, else all values."""
    return values[0] if all(value == values[0] for value in values) else values
