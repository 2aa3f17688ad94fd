"""Export to torchtitan: a Python module that puts a plan into the configuration of a job.

torchtitan's language models consist of `tok_embeddings`, `layers.0` …, `norm` and `lm_head`. A profile's model can be
one of these if it is a list of equal blocks between an embedding and a head, whatever their names are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.errors import InputError
from pipeplan.exports import orders
from pipeplan.exports.degrees import degrees, synchronous
from pipeplan.exports.header import header
from pipeplan.exports.python import literal
from pipeplan.exports.run import torchrun
from pipeplan.exports.stacks import Stack, stack_of, tied
from pipeplan.exports.target import File, refused
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.rendering.templating import template
from pipeplan.text import one_line

FILE = "plan_config.py"
JOBS: Mapping[int, str] = {32: "llama3_8b", 80: "llama3_70b", 126: "llama3_405b"}
"""torchtitan's own jobs by their number of blocks. Other models begin with `SMALL`."""
SMALL = "llama3_debugmodel"


@dataclass(frozen=True)
class Torchtitan:
    """The target torchtitan, whose configuration names the modules of every stage."""

    name: str = "torchtitan"
    title: str = "torchtitan 0.3.0"

    def restrict(self, profile: Profile, options: Options) -> Options:
        """Restrict to a uniform grid with a flush, cuts between blocks, and no recomputation."""
        stack = self._stack(profile, stages=2)
        groups = (names for names in stack.parts() if len(names) > 1)
        return replace(synchronous(self, options), recompute=False, together=(*options.together, *groups))

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` for any other plan."""
        grid, stack = degrees(self, problem, plan), self._stack(problem.profile, stages=len(plan.stages))
        if not grid.stage_major:
            raise refused(self, plan, "the replicas of a stage must be neighbours, one stage after another")
        for number, stage in enumerate(plan.stages, start=1):
            if stage.recompute:
                raise refused(self, plan, f"stage {number} recomputes, where all would have to, block by block")
            for part, names in _parts(stack).items():
                if 0 < len(set(names) & set(stage.layers)) < len(names):
                    raise refused(self, plan, f"stage {number} holds a part of {part} only")

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, File]:
        """The configuration, and the order of passes if torch's schedule has another one."""
        grid, stack = degrees(self, problem, plan), stack_of(problem.profile)
        torch_order = orders.is_torchs(plan, grid)
        text = template("exports/torchtitan.py.j2").render(
            header=header(self, problem, plan),
            run=_run(problem, grid.count, "."),
            model=one_line(f"{problem.profile.model_name}, whose blocks are in {stack.path}"),
            job=JOBS.get(len(stack.blocks), SMALL),
            blocks=len(stack.blocks),
            stages=[_modules(stage, stack) for stage in plan.stages],
            schedule=orders.name_of(plan),
            order="" if torch_order else orders.FILE,
            too_few=orders.too_few(plan, grid),
            degrees=grid,
            # Without a pipeline torchtitan loads the microbatches of an update one by one.
            local=grid.microbatch * (grid.microbatches if grid.stages > 1 else 1),
            python=literal,
        )
        files = {FILE: File(text, "puts the plan into a job's configuration: stages, schedule, degrees, batch sizes")}
        if not torch_order:
            files[orders.FILE] = File(orders.csv(plan), "the order of the passes, which the configuration names")
        return files

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """How to start training."""
        job = JOBS.get(len(stack_of(problem.profile).blocks))
        whose = f"it extends {job}; name your own" if job else "name your job"
        return f"{whose} in {folder}/{FILE}; {'; '.join(_run(problem, degrees(self, problem, plan).count, folder))}"

    def _stack(self, profile: Profile, *, stages: int) -> Stack:
        """The model as a list of blocks. Raises `InputError`, also if its ends share weights and `stages` exceeds 1."""
        try:
            stack = stack_of(profile)
        except InputError as error:
            raise InputError(f"{self.title} has no such model: {error}") from None
        if stages > 1 and (shared := tied(profile, stack)):
            raise InputError(
                f"{shared[0]} and {shared[1]} share their weights, which keeps the whole model in one stage: profile "
                "it with weights for each"
            )
        return stack


TARGET = Torchtitan()


def _run(problem: Problem, workers: int, folder: str) -> list[str]:
    where = f"PYTHONPATH={shlex.quote(folder)}"
    module = FILE.removesuffix(".py")
    return torchrun(problem.cluster, workers, f"-m torchtitan.train --module {module} --config plan", before=where)


def _parts(stack: Stack) -> dict[str, tuple[str, ...]]:
    """The groups of layers that cuts do not separate, by names for messages."""
    blocks = {f"{stack.path}.{index}": names for index, names in enumerate(stack.blocks)}
    return {"the embedding": stack.before, **blocks, "the head": stack.after}


def _modules(stage: Stage, stack: Stack) -> list[str]:
    """The paths of a stage's modules in torchtitan."""
    in_stage = set(stage.layers)
    blocks = [f"layers.{index}" for index, names in enumerate(stack.blocks) if set(names) <= in_stage]
    first = ["tok_embeddings"] if set(stack.before) <= in_stage else []
    return [*first, *blocks, *(["norm", "lm_head"] if set(stack.after) <= in_stage else [])]
