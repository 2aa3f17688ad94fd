"""Export to diffusion-pipe: the lines of its TOML configuration that divide a model among GPUs as the plan does.

diffusion-pipe runs its models with DeepSpeed's pipelines, 1F1B with a flush. It makes one list: an initial layer, the
blocks of every list of the model in turn, and a final layer. Each item passes all tensors to the next one. With
`partition_method = "manual"`, number s of `partition_split` is the index of the first item after stage s. Both count
from 0. So a plan may cut between two blocks, and a layer outside of the blocks belongs to the block before it.
HunyuanVideo has one more layer between its lists of blocks; a comment in the file says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeplan.errors import InputError
from pipeplan.exports.target import ExportFile, ExportTarget, header_lines, keep_ties, refuse_split_ties, stage_line
from pipeplan.exports.uniform_degrees import (
    grid_degrees,
    in_flight_difference,
    refuse_divided_state,
    refuse_irregular,
    restrict_to_synchronous_grid,
)
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE, ZERO_BUBBLE
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.fsdp_units import list_member
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.templates import load_template
from pipeplan.util.text import shell_path

FILE = "pipeline.toml"
INITIAL, FINAL = "the initial layer", "the final layer"


class DiffusionPipe(ExportTarget):
    """The target diffusion-pipe, which pins this version of DeepSpeed."""

    name = "diffusion-pipe"
    title = "diffusion-pipe with DeepSpeed 0.18.4"
    orders_devices = True
    recomputes = True
    unknown = (GPIPE, ZERO_BUBBLE)

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict plans to cuts between blocks, to a uniform grid, and to 1F1B with a flush."""
        groups = tuple(names for names in self._parts(profile).values() if len(names) > 1)
        options = keep_ties(profile, restrict_to_synchronous_grid(self, options))
        return replace(options, together=(*options.together, *groups))

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if diffusion-pipe cannot divide the model like this plan."""
        refuse_split_ties(self, problem.profile.tied, plan)
        refuse_divided_state(self, problem, plan)
        grid = grid_degrees(self, problem, plan)
        refuse_irregular(self, plan, grid, self._parts(problem.profile))

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The lines for the configuration."""
        grid, parts = grid_degrees(self, problem, plan), self._parts(problem.profile)
        held = [[part for part, names in parts.items() if names[0] in stage.layers] for stage in plan.stages]
        again = [number for number, stage in enumerate(plan.stages) if stage.recompute]
        text = load_template("exports/diffusion_pipe.toml.j2").render(
            header=header_lines(self, problem, plan),
            stages=[_stage_line(index, problem, plan, own) for index, own in enumerate(held)],
            split=list(itertools.accumulate(map(len, held)))[:-1],
            degrees=grid,
            again=bool(again),
            again_everywhere=len(again) in (0, len(plan.stages)),
            lists=len({part.rpartition(".")[0] for part in parts} - {""}),
            in_flight=in_flight_difference(problem, plan, grid),
        )
        return {FILE: ExportFile(text, "lines for your configuration: stages, split and batch sizes")}

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to use the file."""
        gpus = grid_degrees(self, problem, plan).count
        return (
            f"put the lines of {shell_path(f'{folder}/{FILE}')} at the top of your configuration, in place of those of "
            f"the same names, and start: deepspeed --num_gpus={gpus} train.py --deepspeed --config CONFIG.toml"
        )

    def _parts(self, profile: Profile) -> dict[str, tuple[str, ...]]:
        """The layers of every item of diffusion-pipe's list, by the item's name. Raises `InputError` without blocks."""
        blocks = _blocks(profile.layers)
        parts, part = dict[str, list[str]](), INITIAL
        last = max((index for index, layer in enumerate(profile.layers) if _member(layer) in blocks), default=-1)
        for index, layer in enumerate(profile.layers):
            member = _member(layer)
            part = FINAL if index > last else member if member in blocks else part
            parts.setdefault(part, []).append(layer.name)
        if not blocks:
            raise InputError(f"{self.title} divides lists of equal blocks, and the paths of the modules name none")
        return {part: tuple(names) for part, names in parts.items()}


TARGET = DiffusionPipe()


def _member(layer: Layer) -> str:
    """The member of a list of modules that a layer belongs to, such as `blocks.3`; empty if there is none."""
    member = list_member(layer)
    return f"{member[0]}.{member[1]}".removeprefix(".") if member else ""


def _blocks(layers: Sequence[Layer]) -> set[str]:
    """The members of the lists of modules whose members are all alike and have weights."""
    lists: dict[str, dict[str, list[Layer]]] = {}
    for layer in layers:
        if member := _member(layer):
            lists.setdefault(member.rpartition(".")[0], {}).setdefault(member, []).append(layer)
    blocks: set[str] = set()
    for members in lists.values():
        shapes = {
            frozenset((layer.name.removeprefix(member), layer.op) for layer in own) for member, own in members.items()
        }
        weighty = any(layer.parameter_bytes for own in members.values() for layer in own)
        if len(members) > 1 and len(shapes) == 1 and weighty:
            blocks |= members.keys()
    return blocks


def _stage_line(index: int, problem: Problem, plan: Plan, parts: Sequence[str]) -> str:
    """`stage_line` with the devices of the stage, if the cluster has several kinds."""
    workers = plan.stages[index].workers
    devices = dict.fromkeys(problem.cluster.device_of(worker).name for worker in workers)
    where = f" ({' and '.join(devices)})" if len(problem.cluster.distinct_devices) > 1 else ""
    return stage_line(index, workers, parts, devices=where)
