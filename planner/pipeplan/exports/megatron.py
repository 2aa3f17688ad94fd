"""Export to Megatron-LM: arguments that give its pipeline the layout of a plan.

In a layout E is the embedding, t a block, L the head with the loss, and `|` ends a stage. The workers of stage s begin
with worker s · (data-parallel size), as in pipeplan's uniform grids. The only schedule without interleaving is 1F1B
with a flush. Stage s, counted from 0, has stages - s microbatches in flight. A layout with more stages than the
pipeline's size is interleaved: its stages are assigned to the ranks in turn, as in pipeplan's interleaved-1f1b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeplan.errors import InputError
from pipeplan.exports.module_stacks import BlockStack, all_groups, shared_weights, stack_of
from pipeplan.exports.target import (
    ExportFile,
    ExportTarget,
    header_lines,
    refuse_split_ties,
    stage_line,
    workers_per_used_server,
)
from pipeplan.exports.uniform_degrees import (
    grid_degrees,
    in_flight_difference,
    refuse_irregular,
    restrict_to_synchronous_grid,
)
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import GPIPE, ZERO_BUBBLE, ZERO_BUBBLE_V
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.rendering.templates import load_template
from pipeplan.util.text import shell_path

FILE = "arguments.sh"


class Megatron(ExportTarget):
    """The target Megatron-LM with Megatron Core 0.16.1."""

    name = "megatron"
    title = "Megatron-LM core_v0.16.1"
    virtual = True
    unknown = (GPIPE, ZERO_BUBBLE, ZERO_BUBBLE_V)

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict plans to cuts between blocks, a uniform grid, 1F1B with a flush, and no recomputation.

        The embedding and the head may share weights. Megatron-LM sums their gradients over the first and last stage.
        """
        stack = self._stack(profile)
        if shared := shared_weights(profile.together, stack):
            raise InputError(
                f"{shared[0]} and {shared[1]} share their weights or memory, so this profile keeps the whole model in "
                "one stage: profile the model again, because new profiles distinguish the two; or profile it without "
                f"tied weights (`tie_word_embeddings=False`), and {self.title} will not tie them either"
            )
        restricted = restrict_to_synchronous_grid(self, options)
        ties = tuple(tie.layers for tie in _other_ties(profile, stack))
        return replace(restricted, recompute=False, together=(*options.together, *stack.groups(), *ties))

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if a plan has no layout, or Megatron-LM would run it differently."""
        stack = self._stack(problem.profile)
        grid = grid_degrees(self, problem, plan)
        refuse_irregular(self, plan, grid, stack.named_parts())
        refuse_split_ties(self, _other_ties(problem.profile, stack), plan)

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The arguments, as a fragment for bash."""
        grid, stack = grid_degrees(self, problem, plan), stack_of(problem.profile)
        text = load_template("exports/megatron.sh.j2").render(
            header=header_lines(self, problem, plan),
            stages=[_stage_line(index, stage, stack) for index, stage in enumerate(plan.stages)],
            blocks=len(stack.blocks),
            layout="|".join(_letters(stage, stack) for stage in plan.stages),
            degrees=grid,
            divided=problem.options.shard_optimizer,
            untied=shared_weights(all_groups(problem.profile), stack) is None,
            servers=workers_per_used_server(problem.cluster, grid.count),
            in_flight="" if plan.virtual else in_flight_difference(problem, plan, grid),
        )
        return {FILE: ExportFile(text, "arguments: the pipeline's layout, degrees of parallelism, batch sizes")}

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to pass the arguments to Megatron-LM."""
        return f'source {shell_path(f"{folder}/{FILE}")}, then pass "${{PIPEPLAN_ARGS[@]}}" to pretrain_gpt.py'

    def _stack(self, profile: Profile) -> BlockStack:
        """The model as a list of blocks. Raises an `InputError` that names the target."""
        return stack_of(profile, f"{self.title} cannot train this model: ")


TARGET = Megatron()


def _other_ties(profile: Profile, stack: BlockStack) -> list[TiedWeights]:
    """The ties that Megatron-LM does not support. It supports one weight that the embedding and the head share."""
    ends = {*stack.before}, {*stack.after}
    return [
        tie
        for tie in profile.tied
        if len(tie.weights) > 1 or len(tie.layers) > 2 or tie.layers[0] not in ends[0] or tie.layers[-1] not in ends[1]
    ]


def _letters(stage: Stage, stack: BlockStack) -> str:
    """A stage in the layout, such as `Et*3`."""
    names = set(stage.layers)
    count = sum(set(block) <= names for block in stack.blocks)
    blocks = "t" * min(count, 1) + (f"*{count}" if count > 1 else "")
    return "E" * (set(stack.before) <= names) + blocks + "L" * (set(stack.after) <= names)


def _stage_line(index: int, stage: Stage, stack: BlockStack) -> str:
    """`stage_line` with the parts of the model."""
    parts = [part for part, names in stack.named_parts().items() if set(names) <= set(stage.layers)]
    return stage_line(index, stage.workers, parts)
