"""Export to torchtitan: a Python module that puts a plan into the configuration of a job.

torchtitan's language models consist of `tok_embeddings`, `layers.0` …, `norm` and `lm_head`. A profile's model can be
such a model if it is a list of equal blocks between an embedding and a head. Names do not matter.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from pipeplan.cost.sharded_data_parallel import shard_groups
from pipeplan.errors import InputError
from pipeplan.exports import uniform_degrees
from pipeplan.exports.module_stacks import BlockStack, all_groups, shared_weights, stack_of
from pipeplan.exports.target import (
    ExportFile,
    ExportTarget,
    header_lines,
    keep_ties,
    python_literal,
    refuse_split_ties,
    torchrun_commands,
)
from pipeplan.exports.uniform_degrees import grid_degrees, restrict_to_synchronous_grid
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.templates import load_template
from pipeplan.util.text import one_line

FILE = "plan_config.py"
JOBS: Mapping[int, str] = {32: "llama3_8b", 80: "llama3_70b", 126: "llama3_405b"}
"""torchtitan's own jobs by their number of blocks. Other models begin with `SMALL`."""
SMALL = "llama3_debugmodel"


class Torchtitan(ExportTarget):
    """The target torchtitan, whose configuration names the modules of every stage."""

    name = "torchtitan"
    title = "torchtitan 0.3.0"
    virtual = True
    divides = True

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict plans to a uniform grid with a flush, cuts between blocks, and no recomputation."""
        stack = self._stack(profile, stages=2)
        options = keep_ties(profile, restrict_to_synchronous_grid(self, options))
        return replace(options, recompute=False, together=(*options.together, *stack.groups()))

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` for any other plan."""
        grid, stack = grid_degrees(self, problem, plan), self._stack(problem.profile, stages=len(plan.stages))
        refuse_split_ties(self, problem.profile.tied, plan)
        uniform_degrees.refuse_divided_state(self, problem, plan)
        uniform_degrees.refuse_irregular(self, plan, grid, stack.named_parts())

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The configuration, and the order of passes if it differs from that of torch's schedule."""
        grid, stack = grid_degrees(self, problem, plan), stack_of(problem.profile)
        torch_order = uniform_degrees.is_torch_order(plan, grid)
        text = load_template("exports/torchtitan.py.j2").render(
            header=header_lines(self, problem, plan),
            run=_run(problem, grid.count, "."),
            model=one_line(f"{problem.profile.model_name}, whose blocks are in {stack.path}"),
            job=JOBS.get(len(stack.blocks), SMALL),
            blocks=len(stack.blocks),
            stages=[_modules(stage, stack) for stage in plan.stages],
            schedule=uniform_degrees.torch_schedule_name(plan),
            order="" if torch_order else uniform_degrees.FILE,
            too_few=uniform_degrees.too_few_microbatches(plan, grid),
            degrees=grid,
            shards=len(shard_groups(plan, problem)[0]) if problem.options.sharding.divides_weights else 1,
            # Without a pipeline torchtitan loads the microbatches of an update one by one.
            local=grid.microbatch * (grid.microbatches if grid.stages > 1 else 1),
            python=python_literal,
        )
        files = {
            FILE: ExportFile(text, "puts the plan into a job's configuration: stages, schedule, degrees, batch sizes")
        }
        if not torch_order:
            files[uniform_degrees.FILE] = ExportFile(
                uniform_degrees.order_csv(plan), "the order of the passes, which the configuration names"
            )
        return files

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to start training."""
        job, workers = JOBS.get(len(stack_of(problem.profile).blocks)), grid_degrees(self, problem, plan).count
        whose = f"it extends {job}; name your own" if job else "name your job"
        return f"{whose} in {folder}/{FILE}; {'; '.join(_run(problem, workers, folder))}"

    def _stack(self, profile: Profile, *, stages: int) -> BlockStack:
        """The model as a list of blocks. Raises `InputError`, also if several `stages` would share weights."""
        stack = stack_of(profile, f"{self.title} has no such model: ")
        if stages > 1 and (shared := shared_weights(all_groups(profile), stack)):
            raise InputError(
                f"{shared[0]} and {shared[1]} share their weights, so all layers would be in one stage: profile a "
                "model in which each has its own weights"
            )
        return stack


TARGET = Torchtitan()


def _run(problem: Problem, workers: int, folder: str) -> list[str]:
    where = f"PYTHONPATH={shlex.quote(folder)}"
    module = FILE.removesuffix(".py")
    return torchrun_commands(
        problem.cluster, workers, f"-m torchtitan.train --module {module} --config plan", before=where
    )


def _modules(stage: Stage, stack: BlockStack) -> list[str]:
    """The paths of a stage's modules in torchtitan."""
    in_stage = set(stage.layers)
    blocks = [f"layers.{index}" for index, names in enumerate(stack.blocks) if set(names) <= in_stage]
    first = ["tok_embeddings"] if set(stack.before) <= in_stage else []
    return [*first, *blocks, *(["norm", "lm_head"] if set(stack.after) <= in_stage else [])]
