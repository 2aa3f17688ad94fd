"""The contents of a plan folder's files: plan.json for people and tools, stages/*.json for the executor."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeplan._version import __version__
from pipeplan.awaited import exposed_allreduce_s, waits
from pipeplan.held import exposed_s, idle_s
from pipeplan.links import Links
from pipeplan.rendering.planned_links import planned_links
from pipeplan.schedules import INFERENCE
from pipeplan.stages import group_allreduce_time

if TYPE_CHECKING:
    from pipeplan.solvers.result import Result
    from pipeplan.solving import Outcome

PLAN_FORMAT, STAGE_FORMAT = "pipeplan-plan", "pipeplan-stage"
VERSION = 1


def plan_document(outcome: Outcome) -> dict[str, Any]:
    """The contents of plan.json, which `solve --json` also prints."""
    profile, score = outcome.problem.profile, outcome.evaluation
    return {
        "format": PLAN_FORMAT,
        "version": VERSION,
        "pipeplan": __version__,
        "profile": {
            "digest": profile.digest(),
            "model": profile.model_name,
            "ref": profile.model_ref,
            "minibatch": profile.minibatch,
            "threads": profile.provenance.threads,
            "kind": profile.provenance.kind,
            "how": profile.provenance.how,
        },
        "cluster": outcome.problem.cluster.to_json() | {"digest": outcome.problem.cluster.digest()},
        "options": {name: value for name, value in asdict(outcome.problem.options).items() if name != "several"},
        "plan": outcome.plan.to_json() | {"config": outcome.plan.config},
        "prediction": {
            "minibatch_s": score.pace_s,
            "minibatches_per_s": score.rate,
            "bound_by": score.bound,
            "copies_synchronisation_s": score.copies_s,
            "batch": None if score.batch is None else asdict(score.batch),
            "stages": [_stage_prediction(outcome, index) for index in range(len(outcome.plan.stages))],
        },
        "baselines": [
            {
                "name": baseline.name,
                "config": baseline.config,
                "minibatch_s": baseline.pace_s,
                "gain": baseline.gain(score.pace_s),
                "remark": baseline.remark,
            }
            for baseline in outcome.baselines
        ],
        "verdict": {
            "agree": outcome.verdict.agree,
            "proven": outcome.verdict.proven,
            "text": outcome.verdict.text,
            "solvers": [result_document(result) for result in outcome.results],
        },
        "status": str(outcome.status),
        "bound_s": outcome.bound_s,
        "gap": outcome.gap,
        "certificate": outcome.certificate.document,
        "certificate_note": outcome.certificate.note,
        "seconds": outcome.phases_s,
    }


def result_document(result: Result) -> dict[str, Any]:
    """The answer of one solver, as JSON."""

    def finite(value: float) -> float | None:
        return value if value < float("inf") else None

    return {
        "solver": result.solver,
        "status": str(result.status),
        "config": result.plan.config if result.plan else None,
        "minibatch_s": finite(result.objective_s),
        "bound_s": finite(result.bound_s),
        "gap": finite(result.gap),
        "seconds": result.seconds,
        "note": result.note,
    }


def _stage_prediction(outcome: Outcome, index: int) -> dict[str, Any]:
    """Prediction for one stage, per minibatch on one replica, which the executor compares with its measurements."""
    stages = outcome.evaluation.stages
    stage, before = stages[index], stages[index - 1] if index else None
    links, waiting = Links.of(outcome.problem.cluster), {}
    if waits(outcome.plan) and outcome.problem.options.contention:
        waiting = {"exposed_sync_s": exposed_allreduce_s(outcome.plan, outcome.problem, links)}
    return {
        "minibatch_s": outcome.evaluation.pace_s,
        "forward_s": stage.forward_s,
        "backward_s": stage.backward_s - stage.update_s,
        "update_s": stage.update_s,
        "sync_s": group_allreduce_time(outcome.plan, outcome.problem, links, index),
        **waiting,
        "receive_bytes": before.boundary_bytes if before else 0,
        "send_bytes": stage.boundary_bytes,
        "send_gradient_bytes": before.boundary_gradient_bytes if before else 0,
        "receive_gradient_bytes": stage.boundary_gradient_bytes,
        "parameter_bytes": stage.parameter_bytes,
        "minibatch_bytes": round(stage.minibatch_bytes),
        "memory_bytes": round(stage.memory_bytes),
    }


def _worker_prediction(outcome: Outcome, index: int) -> dict[str, Any]:
    """Further predictions for a worker of the stage, per minibatch that this worker computes."""
    plan, score, cluster = outcome.plan, outcome.evaluation, outcome.problem.cluster
    shared = (cores for first, stop, cores in cluster.shared_cores if first <= plan.stages[index].workers[0] < stop)
    return {
        "exposed_s": exposed_s(plan, outcome.problem, score, index),
        "wait_s": idle_s(plan, outcome.problem, score, index),
        "boundary_s": score.stages[index].boundary_s / plan.copies,
        "cores": next(shared, 0),
    }


def stage_documents(outcome: Outcome) -> list[dict[str, Any]]:
    """The contents of the stage files. Each holds all that a worker of the stage needs to know."""
    problem, plan = outcome.problem, outcome.plan
    profile, cluster = problem.profile, problem.cluster
    sizes = cluster.server_sizes
    shared = {
        "format": STAGE_FORMAT,
        "version": VERSION,
        "plan": plan.digest(profile.digest(), cluster.digest()),
        "mode": "inference" if plan.inference else "training",
        "model": {
            "ref": profile.model_ref,
            "graph_hash": profile.graph_hash or None,
            "granularity": profile.granularity,
        },
        "minibatch": profile.minibatch,
        "profile": profile.provenance.kind,
        "device": cluster.device.kind,
        "servers": cluster.servers,
        "workers_per_server": cluster.workers_per_server,
        **({"server_sizes": list(sizes)} if len(set(sizes)) > 1 else {}),
        "schedule": {"name": INFERENCE if plan.inference else plan.schedule, "accumulate": plan.accumulate},
        "pipeline": [
            {
                "workers": list(stage.workers),
                "depth": stage.depth,
                "versions": stage.versions,
                "recompute": stage.recompute,
            }
            for stage in plan.stages
        ],
        "links": planned_links(outcome),
    }
    return [
        shared
        | {"stage": index, "layers": list(stage.layers)}
        | {"prediction": _stage_prediction(outcome, index) | _worker_prediction(outcome, index)}
        for index, stage in enumerate(plan.stages)
    ]
