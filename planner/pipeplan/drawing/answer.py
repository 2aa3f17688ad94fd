"""The answer of `pipeplan solve` in at most twenty lines: RUN, ALSO, WHY, TRUST and NEXT.

All texts of the answer are in this file. `pipeplan explain` prints more, and plan.json has everything.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pipeplan.cluster_data.devices import device_mismatch
from pipeplan.drawing.tables import describe_cluster, server_numbers, short_config
from pipeplan.plan.learning_cost import KnownLearning, known_learning
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning.candidate_search import BY_SPEED, DDP, FSDP, HSDP, ONE_SERVER, ONE_WORKER, UNIFORM, ZERO_1
from pipeplan.planning.candidates import Candidate, best_of
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.outcome import Outcome
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.util.text import one_line
from pipeplan.util.units import show_throughput

LABEL, MARGIN = 6, " " * 6
LEAST_WIDTH, MOST_WIDTH = 60, 100
MOST_LINES = 20
DETAILS = ((6, 5), (4, 5), (4, 3), (2, 2), (2, 1))
"""Pairs (most stages, most rivals) that an answer may list. The first pair that keeps the answer within `MOST_LINES`
lines is used. If a pipeline has more stages, its first stages and its last stage are listed."""
USUAL = (DDP, BY_SPEED, ZERO_1, FSDP, HSDP, ONE_SERVER, ONE_WORKER, UNIFORM)
"""Kinds of plans that a user would run without a planner. Of FSDP and HSDP, the faster one is shown."""
LONGEST_CONFIG = 20
LEAST_GAIN = 0.0005
"""Smallest relative gain for which a plan counts as faster; the answer shows tenths of a percent."""


def answer_lines(outcome: Outcome, width: int, next_line: str = "") -> list[str]:
    """The answer as plain lines of at most `width` characters; `next_line` is the suggested next command."""
    lines: list[str] = []
    for stages, rivals in DETAILS:
        lines = _lines(outcome, _Writer(max(LEAST_WIDTH, min(width, MOST_WIDTH)), stages, rivals), next_line)
        if len(lines) <= MOST_LINES:
            break
    return lines


def _lines(outcome: Outcome, writer: _Writer, next_line: str) -> list[str]:
    """The answer with as many stages and rivals as the writer allows."""
    writer.paragraph(_heading(outcome))
    writer.blank()
    _run(writer, outcome)
    _also(writer, outcome)
    writer.labelled("WHY", _why(outcome))
    writer.labelled("TRUST", _trust(outcome))
    if next_line:
        writer.labelled("NEXT", next_line)
    return writer.lines


class _Writer:
    """Collects lines of a given width. Text is wrapped between words; figures are in columns at the right."""

    def __init__(self, width: int, stages: int, rivals: int) -> None:
        self.width, self.stages, self.rivals = width, stages, rivals
        self.lines: list[str] = []

    def blank(self) -> None:
        """Add an empty line."""
        self.lines.append("")

    def paragraph(self, text: str, indent: str = "") -> None:
        """Add wrapped text."""
        self.lines += textwrap.wrap(text, self.width, subsequent_indent=indent, break_long_words=False)

    def labelled(self, label: str, text: str) -> None:
        """Add wrapped text behind a label."""
        self.paragraph(f"{label:<{LABEL}}{text}", MARGIN)

    def fits(self, text: str, *columns: str) -> bool:
        """Whether a text fits beside these figures."""
        return len(text) <= self._room(_right(columns))

    def _room(self, right: str) -> int:
        return self.width - LABEL - (len(right) + 2 if right else 0)

    def row(self, label: str, text: str, *columns: str) -> None:
        """Add a line with figures at the right. A text that does not fit beside them is cut short."""
        right = _right(columns)
        room = self._room(right)
        if len(text) > room:
            text = text[: max(0, room - 1)].rstrip() + "…"
        self.lines.append(f"{label:<{LABEL}}{text:<{room}}  {right}".rstrip())


def _right(columns: Sequence[str]) -> str:
    """The figures of a row."""
    return "   ".join(column for column in columns if column)


def _heading(outcome: Outcome) -> str:
    """The question: model, cluster, batch, and the origin of the times."""
    problem, plan = outcome.problem, outcome.plan
    name, cluster = one_line(problem.profile.model_name), problem.cluster
    where = f"{name} on {one_line(cluster.name)}: {describe_cluster(cluster)}."
    cause = "Ctrl-C" if outcome.choice is not None and outcome.choice.interrupted else "the time limit"
    cut = f" The search was cut off by {cause}." if _cut_off(outcome) else ""
    if plan.inference:
        return f"{where} Inference, minibatch {problem.profile.minibatch}.{cut}"
    return f"{where} {_batch(outcome)} {_times(outcome)}{cut}"


def _cut_off(outcome: Outcome) -> bool:
    """Whether the time limit or Ctrl-C ended the search, and the gap exceeds the tolerance."""
    return outcome.choice is not None and not outcome.choice.finished and outcome.gap > TOLERANCE


def _batch(outcome: Outcome) -> str:
    choice, size = outcome.choice, outcome.problem.profile.minibatch
    if choice is None:
        samples = sorted(set(Updates.of(outcome.plan, size).samples))
        return f"Updates of {' and '.join(map(str, samples))} samples, microbatch {size}."
    assumed = " (assumed; --batch)" if choice.assumed else ""
    return f"Batch {choice.samples}{assumed}, microbatch {size}."


def _times(outcome: Outcome) -> str:
    """The origin of the times. If the cluster has other devices, the device that they are of is named."""
    profile, cluster = outcome.problem.profile, outcome.problem.cluster
    origin = profile.provenance
    modelled = origin.kind == "modelled"
    times = "Times estimated" if modelled else f"Times {origin.kind}"
    if not device_mismatch(profile, cluster):
        return f"{times}."
    return f"{times} {'for' if modelled else 'on'} {one_line(origin.device_name or origin.device)}, another device."


def _run(writer: _Writer, outcome: Outcome) -> None:
    """Write the plan: how it trains, its throughput, and its stages."""
    plan, problem = outcome.plan, outcome.problem
    rate = problem.profile.minibatch / outcome.predicted_s if outcome.predicted_s > 0 else 0.0
    figures = show_throughput(rate), _gain(outcome, rate)
    names = [
        plan_name(plan, problem.options.sharding, problem.profile.minibatch, longest) for longest in (LONGEST_CONFIG, 0)
    ]
    name, manner = names[0], training_manner(plan, problem.profile.minibatch)
    if writer.fits(f"{name}: {manner}", *figures):
        writer.row("RUN", f"{name}: {manner}", *figures)
    else:
        writer.row("RUN", names[0 if writer.fits(name, *figures) else 1], *figures)
        writer.row("", manner)
    stages = list(zip(plan.stages, outcome.evaluation.stages, strict=True))
    for number, (stage, cost) in enumerate(stages, start=1):
        if writer.stages <= number < len(stages):
            if number == writer.stages:
                hidden = f"stage {number}" if number == len(stages) - 1 else f"stages {number} to {len(stages) - 1}"
                writer.row("", f"… {hidden}; pipeplan explain has all")
            continue
        first, last = stage.layers[0], stage.layers[-1]
        layers = first if first == last else f"{first} … {last}"
        servers = server_numbers(stage.workers, problem.cluster)
        plural = "" if servers.isdecimal() else "s"
        where = f", server{plural} {servers}" if problem.cluster.servers > 1 else ""
        workers = f"{stage.replicas} worker{'s' if stage.replicas > 1 else ''}{where}"
        memory = f"{cost.memory_bytes / cost.capacity_bytes:.0%} of memory" if problem.options.memory else ""
        recomputed = ", recomputes" if stage.recompute else ""
        writer.row("", f"stage {number}  {one_line(layers)}{recomputed}", workers, memory)
    idle = problem.cluster.workers - plan.busy
    if idle:
        writer.paragraph(f"{MARGIN}{idle} of {problem.cluster.workers} workers idle{_why_idle(outcome)}", MARGIN)
    _learning(writer, plan, problem)


def _why_idle(outcome: Outcome) -> str:
    """A clause on the best plan that uses more workers; empty if none is known, or if the search was cut off."""
    choice, plan = outcome.choice, outcome.plan
    widest = None if choice is None else choice.widest
    if widest is None or widest.plan.busy <= plan.busy or _cut_off(outcome):
        return ""
    size = outcome.problem.profile.minibatch
    gain = outcome.predicted_s / size / widest.sample_s - 1
    faster = "no faster" if gain < LEAST_GAIN else f"{gain:.1%} faster"
    return f"; the best plan found on {widest.plan.busy} is {faster}"


def plan_name(plan: Plan, sharding: Sharding, microbatch: int, longest: int = LONGEST_CONFIG) -> str:
    """The plan in a few words: DDP, or the configuration, of at most `longest` characters, and the schedule."""
    config = short_config(plan.config, longest)
    if plan.inference:
        return f"{config}, inference"
    if sharding.divides_weights:
        return f"{sharding.upper()} on {plan.busy} workers"
    sharded = " with ZeRO-1" if sharding == Sharding.OPTIMIZER else ""
    name = f"{config}, {plan.schedule}"
    if len(plan.stages) == 1 and Updates.of(plan, microbatch).synchronous:
        shares = f" by shares {config}" if plan.stages[0].shares else ""
        name = f"DDP on {plan.busy} workers{shares}" if plan.busy > 1 else "one worker"
    return f"{name}{sharded}"


def training_manner(plan: Plan, microbatch: int) -> str:
    """How the plan trains, compared with one process, in a few words."""
    if plan.inference:
        return "the forward pass only"
    oldest = max(Updates.of(plan, microbatch).stale_by)
    return f"gradients up to {_updates(oldest)} old" if oldest else "trains like one process"


def _updates(count: int) -> str:
    return f"{count} update{'s' if count > 1 else ''}"


def _gain(outcome: Outcome, rate: float) -> str:
    """The gain over data parallelism at the same batch, which may be fastest on one worker."""
    choice = outcome.choice
    if choice is None:
        gain = outcome.baselines[0].gain(outcome.predicted_s) if outcome.baselines else None
        return "" if gain is None or len(outcome.plan.stages) == 1 else f"{gain:.2f}x DDP"
    rival = choice.rival(DDP)
    if rival is None:
        return "DDP does not fit"
    whole = len(outcome.plan.stages) == 1 and not outcome.problem.options.sharding.divides_weights
    than = "DDP" if rival.plan.busy > 1 else "one worker"
    return "" if whole else f"{rate * rival.sample_s:.2f}x {than}"


def _also(writer: _Writer, outcome: Outcome) -> None:
    """Write the plans that a user would run without a planner, and the gains of rounded and of old gradients."""
    choice, label = outcome.choice, "ALSO"
    if choice is None:
        for baseline in outcome.baselines:
            if baseline.step_s is not None and baseline.fits:
                rate = outcome.problem.profile.minibatch / baseline.step_s
                name = f"{baseline.name}, {short_config(baseline.config, LONGEST_CONFIG)}"
                writer.row(label, name, show_throughput(rate))
                label = ""
        return
    for rival in list(_shown(choice, outcome.plan))[: writer.rivals]:
        writer.row(label, _rival(rival), show_throughput(1 / rival.sample_s))
        label = ""
    sample_s = outcome.predicted_s / outcome.problem.profile.minibatch
    if choice.rounded is not None and writer.rivals > 1:
        name = f"DDP, {choice.rounded.plan.busy} workers, launch.sh --compress bf16"
        rounded_rate = show_throughput(1 / choice.rounded.sample_s)
        writer.row(label, name, rounded_rate, _over_run(choice.rounded, sample_s))
        label = ""
    if choice.stale is not None and choice.stale is not choice.taken:
        _stale(writer, label, choice.stale, sample_s)


def _shown(choice: Choice, plan: Plan) -> Iterator[Candidate]:
    """The rivals that are shown: the best plan of every kind except the chosen plan's kind."""
    taken = choice.taken
    own = plan.config, taken.problem.profile.minibatch, taken.sharding
    alone = [one for one in choice.rivals if len(one.plan.stages) == 1 and one.kind in USUAL and one.kind != UNIFORM]
    usual = [one for one in alone if (one.plan.config, one.problem.profile.minibatch, one.sharding) != own]
    divided = best_of([one for one in usual if one.sharding.divides_weights])
    piped = [one for one in choice.rivals if len(one.plan.stages) > 1 and one.plan != plan]
    others = [one for one in piped if one.kind not in USUAL] if len(plan.stages) == 1 else []
    yield from (one for one in usual if one is divided or not one.sharding.divides_weights)
    yield from (one for one in piped if one.kind == UNIFORM)
    yield from sorted(others, key=lambda one: one.sample_s)[:1]


def _rival(rival: Candidate) -> str:
    config = short_config(rival.plan.config, LONGEST_CONFIG)
    workers = f"{rival.plan.busy} worker{'s' if rival.plan.busy > 1 else ''}"
    size = f"microbatch {rival.problem.profile.minibatch}"
    if rival.kind == ONE_WORKER:
        return f"{rival.kind}, {size}"
    if len(rival.plan.stages) == 1:
        return f"{rival.kind}{f' {config}' if rival.plan.stages[0].shares else ''}, {workers}, {size}"
    name = rival.kind if rival.kind == UNIFORM else f"{rival.plan.schedule}"
    return f"{name} {config}, {workers}, {size}"


def _over_run(one: Candidate, sample_s: float) -> str:
    """The gain of a plan over the chosen plan, which needs `sample_s` seconds per sample."""
    return f"{sample_s / one.sample_s:.2f}x RUN"


def _stale(writer: _Writer, label: str, stale: Candidate, sample_s: float) -> None:
    """Write the lines on the best plan with old gradients."""
    config, rate = short_config(stale.plan.config, LONGEST_CONFIG), show_throughput(1 / stale.sample_s)
    name = f"{config}, old gradients (--staleness {stale.delay})"
    writer.row(label, name, rate, _over_run(stale, sample_s))
    _learning(writer, stale.plan, stale.problem)


def _learning(writer: _Writer, plan: Plan, problem: Problem) -> None:
    """Write the measured effect of the plan's old gradients on learning; nothing if no gradients are old."""
    profile = problem.profile
    known = known_learning(plan, profile.optimizer_name, profile.optimizer_state_ratio, problem.options.correction)
    if known is not None:
        writer.paragraph(MARGIN + learning_summary(known), MARGIN)


def learning_summary(known: KnownLearning) -> str:
    """The measured effect of gradients this old on training, in one clause."""
    old = _updates(known.delay)
    if not known.measured:
        return f"Not measured for the optimiser {known.optimizer}."
    if not known.cases:
        return f"Not measured for {known.optimizer} and gradients {old} old."
    seeds, reached = sum(case.seeds for case in known.cases), sum(case.reached for case in known.cases)
    tests = ", ".join(case.task for case in known.cases)
    if reached < seeds:
        word = "RISKY" if reached else "NOT SAFE"
        missed = f"{known.optimizer} missed the goal in {seeds - reached} of {seeds} runs"
        return f"{word}: {missed} of the nearest test ({tests})."
    if known.cost is None:
        return f"{known.optimizer} reached the goal in all {seeds} runs of the nearest test ({tests})."
    return (
        f"{known.optimizer} reached the goal in all {seeds} runs of the nearest test ({tests}), with "
        f"{known.cost:.2f} times the samples."
    )


def _why(outcome: Outcome) -> str:
    """The resource that limits the step time."""
    bound, waits = outcome.evaluation.bound, outcome.figure.ratio
    if waits is not None and waits > 1.03:
        return f"bound by {bound}; waiting between workers adds {waits - 1:.0%}"
    return f"bound by {bound}"


def _trust(outcome: Outcome) -> str:
    """The origin of the plan's figure, and what is proven about it."""
    figure, profile = outcome.figure, outcome.problem.profile
    if figure.simulated_s is not None:
        source = "simulated"
    else:
        source = f"by formula ({figure.note})" if figure.note else "by formula"
    run = "" if profile.provenance.kind == "calibrated" else ", never run on this cluster"
    unchecked = "; the self-check of the stages was left out" if profile.unchecked else ""
    return f"{source}{run}; {outcome.verdict.text}{unchecked}"
