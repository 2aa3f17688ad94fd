"""Export to torch.distributed.pipelining: a module with cuts, mesh and schedule, and the order of passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeplan.exports import layer_chains, uniform_degrees
from pipeplan.exports.layer_chains import ModuleBoundaries
from pipeplan.exports.target import (
    ExportFile,
    ExportTarget,
    header_lines,
    keep_ties,
    python_literal,
    python_number_list,
    refusal,
    refuse_split_ties,
)
from pipeplan.exports.uniform_degrees import GridDegrees, grid_degrees, restrict_to_synchronous_grid
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ZERO_BUBBLE_V
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.templates import load_template


class TorchPipelining(ExportTarget):
    """The target torch.distributed.pipelining, whose `pipeline()` traces a model and cuts it at modules."""

    name = "torch-pipelining"
    title = "torch.distributed.pipelining of torch 2.13.0"
    virtual = True

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict plans to uniform grids with a flush, cut at modules. A stage sends only to the next stage."""
        boundaries = ModuleBoundaries(profile)
        options = keep_ties(profile, restrict_to_synchronous_grid(self, options))
        if options.schedule == ZERO_BUBBLE_V:
            options = replace(options, recompute=False)
        return layer_chains.restrict_to_places(
            self, boundaries, layer_chains.compatible_places(boundaries, options), options
        )

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` for any other plan."""
        grid_degrees(self, problem, plan)
        uniform_degrees.refuse_divided_state(self, problem, plan)
        if plan.schedule == ZERO_BUBBLE_V and any(stage.recompute for stage in plan.stages):
            raise refusal(self, plan, "a stage recomputes, whose backward pass torch cannot divide")
        refuse_split_ties(self, problem.profile.tied, plan)
        layer_chains.cut_places(self, ModuleBoundaries(problem.profile), problem, plan)

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """pipeline.py and schedule.csv."""
        grid = grid_degrees(self, problem, plan)
        return {
            "pipeline.py": ExportFile(
                self._pipeline(problem, plan, grid), "where the model is cut, the mesh, the schedule"
            ),
            uniform_degrees.FILE: ExportFile(
                uniform_degrees.order_csv(plan), "the order of the passes, which torch's schedules load"
            ),
        }

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to start training."""
        return f"import {folder}/pipeline.py in your training script, as pipeplan docs trainers shows"

    def _pipeline(self, problem: Problem, plan: Plan, grid: GridDegrees) -> str:
        boundaries = ModuleBoundaries(problem.profile)
        splits = [boundaries.splits[place] for place in layer_chains.cut_places(self, boundaries, problem, plan)]
        return load_template("exports/torch_pipelining.py.j2").render(
            header=header_lines(self, problem, plan),
            python=python_literal,
            fitted=python_number_list,
            splits=[(split.module, "BEGINNING" if split.before else "END") for split in splits],
            ranks=grid.workers,
            places=uniform_degrees.places(plan),
            rounds=plan.virtual,
            folded=plan.schedule == ZERO_BUBBLE_V,
            stages=len(plan.stages),
            replicas=grid.replicas,
            microbatch=grid.microbatch,
            microbatches=grid.microbatches,
            schedule=uniform_degrees.torch_schedule_name(plan),
            order=uniform_degrees.FILE,
            same=uniform_degrees.is_torch_order(plan, grid),
            too_few=uniform_degrees.too_few_microbatches(plan, grid),
            recomputed=[index for index, stage in enumerate(plan.stages) if stage.recompute],
        )


TARGET = TorchPipelining()
