"""Writes a plan folder: plan.json for people and tools, stages/*.json for the executor, launch.sh to run it.

The folder is made beside its destination and moved there whole, so that a half-written one never exists.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jinja2

from pipeplan import __version__, resources
from pipeplan.errors import InputError
from pipeplan.files import write_json, write_text
from pipeplan.links import Links
from pipeplan.solve import Outcome
from pipeplan.solvers.result import Result
from pipeplan.stages import group_allreduce_time

PLAN_FORMAT, STAGE_FORMAT = "pipeplan-plan", "pipeplan-stage"
VERSION = 1


def plan_document(outcome: Outcome) -> dict[str, Any]:
    """What plan.json says, also what `solve --json` prints."""
    profile, score = outcome.problem.profile, outcome.evaluation
    return {
        "format": PLAN_FORMAT,
        "version": VERSION,
        "pipeplan": __version__,
        "profile": {
            "digest": profile.digest(),
            "model": profile.model_name,
            "minibatch": profile.minibatch,
            "kind": profile.provenance.kind,
            "how": profile.provenance.how,
        },
        "cluster": outcome.problem.cluster.to_json() | {"digest": outcome.problem.cluster.digest()},
        "options": {
            "overlap": outcome.problem.options.overlap,
            "memory": outcome.problem.options.memory,
            "stages": outcome.problem.options.stages,
            "max_replicas": outcome.problem.options.max_replicas,
        },
        "plan": outcome.plan.to_json() | {"config": outcome.plan.config},
        "prediction": {
            "minibatch_s": score.pace_s,
            "minibatches_per_s": score.rate,
            "bound_by": score.bound,
            "copies_synchronisation_s": score.copies_s,
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
            "solvers": [_result(result) for result in outcome.results],
        },
        "published": _published(outcome),
        "seconds": outcome.phases_s,
    }


def _published(outcome: Outcome) -> dict[str, float] | None:
    if outcome.published is None:
        return None
    pace, baseline = outcome.published
    return {"minibatch_s": pace, "data_parallelism_s": baseline, "gain": baseline / pace}


def _result(result: Result) -> dict[str, Any]:
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
    """One stage as the executor compares it with what it measures: per minibatch, on one replica."""
    stages = outcome.evaluation.stages
    stage, before = stages[index], stages[index - 1] if index else None
    return {
        "minibatch_s": outcome.evaluation.pace_s,
        "forward_s": stage.forward_s,
        "backward_s": stage.backward_s,
        "sync_s": group_allreduce_time(outcome.plan, outcome.problem, Links.of(outcome.problem.cluster), index),
        "receive_bytes": before.boundary_bytes if before else 0,
        "send_bytes": stage.boundary_bytes,
        "memory_bytes": round(stage.memory_bytes),
    }


def stage_documents(outcome: Outcome) -> list[dict[str, Any]]:
    """What the stage files say: each holds all that a worker of the stage has to know."""
    problem, plan = outcome.problem, outcome.plan
    profile, cluster = problem.profile, problem.cluster
    identity = json.dumps([plan.to_json(), profile.digest(), cluster.digest()], sort_keys=True)
    shared = {
        "format": STAGE_FORMAT,
        "version": VERSION,
        "plan": "sha256:" + hashlib.sha256(identity.encode()).hexdigest(),
        "mode": "inference" if plan.inference else "training",
        "model": {"ref": profile.model_ref, "graph_hash": profile.graph_hash or None},
        "minibatch": profile.minibatch,
        "device": cluster.device.kind,
        "servers": cluster.servers,
        "workers_per_server": cluster.workers_per_server,
        "schedule": {"name": "forward-only" if plan.inference else "1f1b-stashing"},
        "pipeline": [
            {"workers": list(stage.workers), "depth": stage.depth, "versions": stage.versions} for stage in plan.stages
        ],
    }
    return [
        shared | {"stage": index, "layers": list(stage.layers), "prediction": _stage_prediction(outcome, index)}
        for index, stage in enumerate(plan.stages)
    ]


def template(name: str) -> jinja2.Template:
    """A template of the bundled folder, with the filter `shell_quote` for every value that a shell reads."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["shell_quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(name)


def launch_script(outcome: Outcome) -> str:
    """The text of launch.sh. Every value is quoted for the shell, whatever it contains."""
    cluster = outcome.problem.cluster
    return template("launch.sh.j2").render(
        plan_title=one_line(f"{outcome.problem.profile.model_name} as {outcome.plan.config} on {cluster.name}"),
        servers=cluster.servers,
        workers_per_server=cluster.workers_per_server,
        device=cluster.device.kind,
        python=sys.executable,
        # As many as the profile was measured with, so that the prediction is for what runs.
        threads=max(1, outcome.problem.profile.provenance.threads),
        version=__version__,
    )


def one_line(value: object) -> str:
    """Text without line breaks or control characters, for a comment in a script."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Raise an `InputError` where `folder` has something that must not be lost."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; a plan is written to a folder: give another with -o")
    if not any(folder.iterdir()):
        return
    if not (folder / "plan.json").exists():
        raise InputError(f"{folder} is not empty and holds no plan; give another folder with -o")
    if not force:
        raise InputError(f"{folder} already holds a plan; give another folder with -o, or --force to replace it")


def write_plan(outcome: Outcome, folder: Path, *, force: bool = False) -> None:
    """Write the plan folder; with `force`, in place of a plan that is there (its runs are kept)."""
    refuse_to_overwrite(folder, force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        write_json(scratch / "plan.json", plan_document(outcome))
        for index, document in enumerate(stage_documents(outcome)):
            write_json(scratch / "stages" / f"stage-{index}.json", document)
        write_text(scratch / "launch.sh", launch_script(outcome), mode=0o755)
        scratch.chmod(0o755)
        _replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(scratch: Path, folder: Path) -> None:
    """Move the new folder in place of the old one, taking along what pipeplan's runs left there."""
    try:
        if folder.is_dir():
            if (folder / "runs").is_dir():
                (folder / "runs").rename(scratch / "runs")
            retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(retired / folder.name)
            scratch.rename(folder)
            shutil.rmtree(retired)
        else:
            scratch.rename(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def write_disagreement(results: tuple[Result, ...], folder: Path) -> list[Path]:
    """Write the contradicting plans beside where the plan would have gone; returns the files."""
    written = []
    for result in results:
        kind = "ilp" if result.solver.startswith("ILP") else "dp"
        path = folder.with_name(f"{folder.name}-disagreement-{kind}.json")
        plan = result.plan.to_json() if result.plan else None
        write_json(
            path, {"format": "pipeplan-disagreement", "version": VERSION, "result": _result(result), "plan": plan}
        )
        written.append(path)
    return written
