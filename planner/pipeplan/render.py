"""Writes a plan folder: plan.json for people and tools, stages/*.json for the executor, launch.sh to run it.

The files are written in full beside their places and then moved there, so that no half-written plan can be started.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from pipeplan import __version__, resources
from pipeplan.awaited import exposed_allreduce_s, waits
from pipeplan.errors import InputError
from pipeplan.files import write_json, write_text
from pipeplan.held import exposed_s, idle_s
from pipeplan.links import Links
from pipeplan.plan import INFERENCE
from pipeplan.stages import group_allreduce_time
from pipeplan.text import one_line

if TYPE_CHECKING:  # those who only want a template need not wait for the solvers
    from pipeplan.solve import Outcome
    from pipeplan.solvers.result import Result

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
            "solvers": [_result(result) for result in outcome.results],
        },
        "status": str(outcome.status),
        "bound_s": outcome.bound_s,
        "gap": outcome.gap,
        "certificate": outcome.certificate.document,
        "certificate_note": outcome.certificate.note,
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
    """What a worker of the stage compares besides, which follows from the rest: per minibatch that it computes."""
    plan, score, cluster = outcome.plan, outcome.evaluation, outcome.problem.cluster
    shared = (cores for first, stop, cores in cluster.shared_cores if first <= plan.stages[index].workers[0] < stop)
    return {
        "exposed_s": exposed_s(plan, outcome.problem, score, index),
        "wait_s": idle_s(plan, outcome.problem, score, index),
        "boundary_s": score.stages[index].boundary_s / plan.copies,
        "cores": next(shared, 0),
    }


def stage_documents(outcome: Outcome) -> list[dict[str, Any]]:
    """What the stage files say: each holds all that a worker of the stage has to know."""
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
    }
    return [
        shared
        | {"stage": index, "layers": list(stage.layers)}
        | {"prediction": _stage_prediction(outcome, index) | _worker_prediction(outcome, index)}
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
        server_sizes=cluster.server_sizes if len(set(cluster.server_sizes)) > 1 else (),
        device=cluster.device.kind,
        python=sys.executable,
        # As many as the profile was measured with, so that the prediction is for what runs.
        threads=max(1, outcome.problem.profile.provenance.threads),
        version=__version__,
    )


def refuse_to_overwrite(folder: Path, force: bool) -> None:
    """Raise an `InputError` where a plan cannot, or must not, be written to `folder`."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; a plan is written to one: give another with -o")
    for parent in folder.parents:
        if parent.exists():
            if not parent.is_dir():
                raise InputError(f"{parent} is not a folder, so that {folder} cannot be made: give another with -o")
            break
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / "plan.json").exists():
        raise InputError(f"{folder} is not empty and holds no plan; give another folder with -o")
    if not force:
        raise InputError(f"{folder} already holds a plan; give another folder with -o, or --force to replace it")


def write_plan(outcome: Outcome, folder: Path, *, force: bool = False) -> None:
    """Write the plan folder; with `force`, in place of a plan that is there. All else in the folder stays."""
    refuse_to_overwrite(folder, force)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-plan.", dir=folder))
        try:
            _write_files(outcome, scratch)
            _move_in(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if made and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def _write_files(outcome: Outcome, scratch: Path) -> None:
    write_json(scratch / "plan.json", plan_document(outcome))
    for index, document in enumerate(stage_documents(outcome)):
        write_json(scratch / "stages" / f"stage-{index}.json", document)
    write_text(scratch / "launch.sh", launch_script(outcome), mode=0o755)


def _move_in(scratch: Path, folder: Path) -> None:
    """Put the files of a plan, written in full, in the place of those of an older one.

    launch.sh comes last, and the older one goes first: whatever interrupts this, no script starts a mixture.
    """
    (folder / "launch.sh").unlink(missing_ok=True)
    if (folder / "stages").exists():
        (folder / "stages").rename(scratch / "old-stages")
    (scratch / "stages").rename(folder / "stages")
    for name in ("plan.json", "launch.sh"):
        (scratch / name).replace(folder / name)


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
