"""Export to DeepSpeed: a subclass of `PipelineModule` with the stages of the plan, a configuration and a host file.

The workers of stage s begin with worker s · (data-parallel size) (`PipeDataParallelTopology`), as in pipeplan's uniform
grids. DeepSpeed's schedule is 1F1B with a flush. Stage s, counted from 0, has stages - s microbatches in flight.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace

from pipeplan.exports.layer_chains import ChainItem, chain_of
from pipeplan.exports.target import (
    ExportFile,
    ExportTarget,
    header_lines,
    keep_ties,
    python_literal,
    refuse_split_ties,
    stage_line,
    workers_per_used_server,
)
from pipeplan.exports.uniform_degrees import (
    GridDegrees,
    grid_degrees,
    in_flight_difference,
    refuse_irregular,
    restrict_to_synchronous_grid,
)
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import GPIPE, ZERO_BUBBLE
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.templates import load_template
from pipeplan.util.text import one_line

MODULE, CONFIG, HOSTS = "planned_pipeline.py", "ds_config.json", "hostfile"


class DeepSpeed(ExportTarget):
    """The target DeepSpeed 0.19.8."""

    name = "deepspeed"
    title = "DeepSpeed 0.19.8"
    recomputes = True
    unknown = (GPIPE, ZERO_BUBBLE)

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict plans to cuts that a single output crosses, to a uniform grid, and to 1F1B with a flush."""
        groups = tuple(item.layers for item in self._chain(profile) if len(item.layers) > 1)
        options = keep_ties(profile, restrict_to_synchronous_grid(self, options))
        return replace(options, together=(*options.together, *groups))

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if DeepSpeed cannot cut the model like this plan, or would run it differently."""
        refuse_split_ties(self, problem.profile.tied, plan)
        items = self._chain(problem.profile) if len(plan.stages) > 1 else ()
        grid = grid_degrees(self, problem, plan)
        parts = {item.label: item.layers for item in items}
        refuse_irregular(self, plan, grid, parts)

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The module, the configuration and the host file."""
        grid, lines = grid_degrees(self, problem, plan), header_lines(self, problem, plan)
        starts, stages = _starts(problem, plan), list(zip(grid.workers, plan.stages, strict=True))
        module = load_template("exports/deepspeed.py.j2").render(
            header=lines,
            starts=[python_literal(item.label if item else "") for item in starts],
            about=[stage_line(at, own, _layers(problem, stage), "…") for at, (own, stage) in enumerate(stages)],
            beside=sorted({one_line(name) for item in starts if item for name in item.beside}),
            in_flight=in_flight_difference(problem, plan, grid),
            recompute=[stage.recompute for stage in plan.stages],
            degrees=grid,
            module=MODULE.removesuffix(".py"),
            config=CONFIG,
        )
        return {
            MODULE: ExportFile(module, "a PipelineModule with the stages of the plan"),
            CONFIG: ExportFile(
                _config(problem, plan, grid), "batch sizes, to which you add the rest of your configuration"
            ),
            HOSTS: ExportFile(
                _hosts(lines, workers_per_used_server(problem.cluster, grid.count)),
                "slots of every server; put in your hosts",
            ),
        }

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to use the module."""
        return (
            f"put the names of your hosts into {shlex.quote(f'{folder}/{HOSTS}')}, and build PlannedPipeline of "
            f"{shlex.quote(f'{folder}/{MODULE}')} from your list of layers"
        )

    def _chain(self, profile: Profile) -> tuple[ChainItem, ...]:
        """The model as a list of layers. Raises an `InputError` that names the target."""
        return chain_of(profile, f"{self.title} cannot cut this model: ")


TARGET = DeepSpeed()


def _starts(problem: Problem, plan: Plan) -> list[ChainItem | None]:
    """The item with which each stage begins; None for the first stage, which begins with the first layer."""
    if len(plan.stages) == 1:
        return [None]
    items = chain_of(problem.profile)
    return [None, *(next(item for item in items if item.layers[0] in stage.layers) for stage in plan.stages[1:])]


def _layers(problem: Problem, stage: Stage) -> list[str]:
    """The names of a stage's layers, in the order of the profile."""
    return [layer.name for layer in problem.profile.layers if layer.name in set(stage.layers)]


def _config(problem: Problem, plan: Plan, grid: GridDegrees) -> str:
    config: dict[str, object] = {
        "train_batch_size": grid.batch,
        "train_micro_batch_size_per_gpu": grid.microbatch,
        "gradient_accumulation_steps": grid.microbatches,
    }
    if any(stage.recompute for stage in plan.stages):
        # Reentrant checkpointing needs inputs with gradients, and the first stage has none.
        config["pipeline"] = {"use_reentrant": False}
    if problem.options.shard_optimizer:
        config["zero_optimization"] = {"stage": 1}
    return json.dumps(config, indent=2) + "\n"


def _hosts(lines: list[str], slots: list[int]) -> str:
    comment = [*lines, "Put the names of your hosts in place of server0 …, in the order of the cluster's servers."]
    return "".join(
        [*(f"# {line}\n" for line in comment), *(f"server{index} slots={count}\n" for index, count in enumerate(slots))]
    )
