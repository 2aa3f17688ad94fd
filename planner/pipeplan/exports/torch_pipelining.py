"""Export to torch.distributed.pipelining: a module with `split_spec`, the order of passes, and a training script."""

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
    """The target torch.distributed.pipelining, whose `pipeline()` traces a model and cuts it at modules."""

    name = "torch-pipelining"
    title = "torch.distributed.pipelining of torch 2.13.0"

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict to a uniform grid with a flush, cuts at modules, and stages that send to the next stage only."""
        boundaries = Boundaries(profile)
        options = synchronous(self, options)
        return chain.restrict(self, boundaries, chain.neighbourly(boundaries, options), options)

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` for any other plan."""
        degrees(self, problem, plan)
        chain.places_of(self, Boundaries(problem.profile), problem, plan)

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, File]:
        """pipeline.py, schedule.csv, and train.py if the profile names the job."""
        grid = degrees(self, problem, plan)
        files = {
            "pipeline.py": File(self._pipeline(problem, plan, grid), "where the model is cut, the mesh, the schedule"),
            orders.FILE: File(orders.csv(plan), "the order of the passes, which torch's schedules load"),
        }
        if problem.profile.model_ref:
            text = template("exports/torch_pipelining_train.py.j2").render(
                header=header(self, problem, plan) + torchrun(problem.cluster, grid.count, "train.py"),
                model=problem.profile.model_ref,
                python=literal,
            )
            files["train.py"] = File(text, "trains the job with it, for torchrun")
        return files

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to start training."""
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
