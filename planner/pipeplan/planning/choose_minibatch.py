"""`--minibatch auto`: the minibatch size with the most samples per second among those that a profile holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError, NotFoundInTimeError
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.stated.choose import stated_plan_s
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE, Deadline


@dataclass(frozen=True)
class MinibatchChoice:
    """The best plan of one minibatch size."""

    problem: Problem
    samples_per_s: float | None
    """None if no plan fits."""
    config: str
    in_time: bool = True
    """Whether there was time enough to find a plan, or that there is none."""

    @property
    def minibatch(self) -> int:
        """Samples in one minibatch."""
        return self.problem.profile.minibatch


def choose_minibatch(
    problem: Problem,
    maximum_cuts: int,
    batch: int | None = None,
    deadline: Deadline = NO_DEADLINE,
    *,
    simulate: bool = True,
) -> tuple[Problem, list[MinibatchChoice]]:
    """The problem at its best size, and the results of all sizes, best first.

    Sizes are compared by the stated paces of their best plans, or without `simulate` by the formulas. Among equally
    fast sizes the smallest is taken. A `batch`, in samples per update, restricts the sizes to its divisors and sets the
    minibatches per update of each. The sizes share the time until the deadline. Raises `InputError` if the profile
    holds a single size, and `InfeasibleError` if no size has a plan that fits.
    """
    sizes = sizes_to_try(problem.profile)
    choices = []
    tried = [choice for choice in sizes if batch is None or batch % choice == 0]
    for number, size in enumerate(tried):
        accumulate = problem.options.accumulate if batch is None else batch // size
        options = replace(problem.options, accumulate=accumulate)
        sized = replace(problem, profile=problem.profile.rescaled(size), options=options)
        ends = deadline.share(1 / (len(tried) - number))
        best, in_time = best_in_time(sized, maximum_cuts, ends)
        rate, config = None, ""
        if best is not None:
            score = evaluate(best.plan, sized)
            rate = size / (stated_plan_s(sized, best.plan, score, ends) if simulate else score.pace_s)
            config = best.plan.config
        choices.append(MinibatchChoice(sized, rate, config, in_time))
    choices.sort(key=lambda choice: -(choice.samples_per_s or 0.0))
    if choices[0].samples_per_s is None and not all(choice.in_time for choice in choices):
        raise NotFoundInTimeError("no plan of any minibatch size was found in time; give more with --time-limit")
    if choices[0].samples_per_s is None:
        raise InfeasibleError(f"no minibatch size has a plan that fits: tried {', '.join(map(str, sizes))}")
    return choices[0].problem, choices


def sizes_to_try(profile: Profile) -> list[int]:
    """The minibatch sizes that a profile holds. Raises `InputError` if it holds a single one."""
    sizes = [size.minibatch for size in profile.all_sizes]
    if len(sizes) == 1:
        raise InputError(
            f"--minibatch auto chooses among measured sizes, and the profile has one, {sizes[0]}: measure several, as "
            "in pipeplan profile MODEL --batch 8,16,32"
        )
    return sizes
