"""Weights that layers in several stages of a plan share: trainers that do not sum their gradients get no such plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipeplan.exports.target import ExportTarget, refusal
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights


def keep_ties(profile: Profile, options: Options) -> Options:
    """The options under which layers that share weights are in one stage."""
    return replace(options, together=(*options.together, *(tie.layers for tie in profile.tied)))


def refuse_split_ties(target: ExportTarget, ties: Iterable[TiedWeights], plan: Plan) -> None:
    """Raise `InputError` if stages of the plan share some of these weights."""
    stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
    for tie in ties:
        stages = sorted({stage_of[name] for name in tie.layers})
        if len(stages) > 1:
            where = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
            raise refusal(target, plan, f"{where} share {tie.weights[0]}, whose gradients this export does not sum")
