"""The export to torch.distributed.pipelining: split_spec, schedule, its order as a CSV file, and a script to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from pipeplan.exports import chain, orders
from pipeplan.exports.boundaries import Boundaries
from pipeplan.exports.degrees import Degrees, degrees, synchronous
from pipeplan.exports.header import header
from pipeplan.exports.python import fitted, literal
from pipeplan.exports.run import torchrun
from pipeplan.exports.target import File
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.rendering.templating import template


class TorchPipelining:
    """torch.distributed.pipelining, whose `pipeline()` traces the model and cuts it at modules."""

    name = "torch-pipelining"
    title = "torch.distributed.pipelining of torch 2.13.0"

    def restrict(self, profile: Profile, options: Options) -> Options:
        """A uniform grid with a flush, and stages that `split_spec` can tell and that only talk to the next."""
        boundaries = Boundaries(profile)
        options = synchronous(self, options)
        return chain.restrict(self, boundaries, chain.neighbourly(boundaries, options), options)

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise an `InputError` for what is no such plan."""
        degrees(self, problem, plan)
        chain.places_of(self, Boundaries(problem.profile), problem, plan)

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, File]:
        """pipeline.py and schedule.csv, and train.py where the profile says which job it is of."""
        grid = degrees(self, problem, plan)
        found = {
            "pipeline.py": File(self._pipeline(problem, plan, grid), "where the model is cut, the mesh, the schedule"),
            orders.FILE: File(orders.csv(plan), "the order of the passes, which torch's schedules load"),
        }
        if problem.profile.model_ref:
            text = template("exports/torch_pipelining_train.py.j2").render(
                header=header(self, problem, plan) + torchrun(problem.cluster, grid.count, "train.py"),
                model=problem.profile.model_ref,
                python=literal,
            )
            found["train.py"] = File(text, "trains the job with it, for torchrun")
        return found

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to start it."""
        if not problem.profile.model_ref:
            return f"import {folder}/pipeline.py in your training script; the profile names no job to write one for"
        grid = degrees(self, problem, plan)
        return "; ".join(torchrun(problem.cluster, grid.count, shlex.quote(f"{folder}/train.py")))

    def _pipeline(self, problem: Problem, plan: Plan, grid: Degrees) -> str:
        boundaries = Boundaries(problem.profile)
        splits = [boundaries.splits[place] for place in chain.places_of(self, boundaries, problem, plan)]
        return template("exports/torch_pipelining.py.j2").render(
            header=header(self, problem, plan),
            python=literal,
            fitted=fitted,
            splits=[(split.module, "BEGINNING" if split.before else "END") for split in splits],
            ranks=grid.workers,
            stages=grid.stages,
            replicas=grid.replicas,
            microbatch=grid.microbatch,
            microbatches=grid.microbatches,
            schedule=orders.name_of(plan),
            order=orders.FILE,
            same=orders.is_torchs(plan, grid),
            too_few=orders.too_few(plan, grid),
            recomputed=[index for index, stage in enumerate(plan.stages) if stage.recompute],
        )


TARGET = TorchPipelining()
