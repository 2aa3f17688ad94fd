"""Random small problems, as the oracle takes them and as the planner does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from brute_force import Best
from brute_machines import Instance, Machine

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights

ACCUMULATING = ("2bw", "gpipe", "1f1b-flush", "zb-h1")
ALL_SCHEDULES = ("1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush")
LARGER = [(2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 3), (4, 1), (2, 1, 2)]
SHAPES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 3), (4, 1), (2, 1, 2)]


def random_instance(seed: int, *, layers: int = 6) -> Instance:
    """A DAG of up to `layers` layers on up to 6 workers; a fresh mixture of limits and options for every seed."""
    rng = random.Random(seed)
    count = rng.randint(1, layers)
    tensors = []
    for source in range(count - 1):
        chain = rng.random() < 0.7
        targets = {source + 1} if chain else set()
        targets |= {target for target in range(source + 1, count) if rng.random() < 0.2}
        if targets:
            size = float(rng.randint(0, 40))
            gradient = size if rng.random() < 0.8 else 0.0
            tensors.append((source, tuple(sorted(targets)), size, gradient))
    shape = rng.choice(SHAPES)
    bandwidths = sorted((float(rng.choice([4, 8, 20, 100])) for _ in shape), reverse=rng.random() < 0.8)
    levels = [(n, bandwidth, rng.choice([0.0, 0.0, 0.5])) for n, bandwidth in zip(shape, bandwidths, strict=True)]
    made = [
        {
            "f": float(rng.randint(0, 10)),
            "b": float(rng.randint(0, 20)),
            "w": float(rng.choice([0, 0, 5, 30, 100])),
            "s": float(rng.randint(0, 60)),
            "u": float(rng.choice([0, 0, 7])),
        }
        for _ in range(count)
    ]
    together = (tuple(sorted(rng.sample(range(count), 2))),) if count >= 3 and rng.random() < 0.2 else ()
    return Instance(
        layers=made,
        tensors=tensors,
        levels=levels,
        memory=math.inf if rng.random() < 0.4 else float(rng.choice([250, 400, 700, 1200])),
        overlap=rng.choice([1.0, 1.0, 0.0, 0.5]),
        state=rng.choice([0.0, 1.0, 2.0]),
        inference=rng.random() < 0.15,
        together=together,
        stages=rng.randint(1, count) if rng.random() < 0.1 and math.prod(shape) >= count else None,
        max_replicas=rng.choice([None, None, None, 1, 2]),
    )


def mixed_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Every option in the draw, of one schedule where it is named; synchronisation and memory bind more often."""
    rng = random.Random(f"mixed {seed}")
    shape = rng.choice(LARGER)
    made = [
        {
            "f": float(rng.randint(1, 10)),
            "b": float(rng.randint(0, 20)),
            "w": float(rng.choice([0, 20, 60, 200])),
            "s": float(rng.randint(0, 120)),
            "u": float(rng.choice([0, 0, 7])),
        }
        for _ in range(rng.randint(min(3, layers), layers))
    ]
    if seed % 2:
        steps = random.Random(f"update {seed}")
        made = [layer | {"t": float(steps.randint(0, 6)) if layer["w"] else 0.0} for layer in made]
    levels = [_level(rng, n) for n in shape]
    chosen = schedule or rng.choice(ALL_SCHEDULES)
    state = rng.choice([0.0, 1.0, 2.0])
    whole = sum(layer["s"] + layer["w"] * (2 + state) for layer in made)
    return Instance(
        layers=made,
        tensors=_tensors(rng, len(made)),
        levels=sorted(levels, key=lambda level: -level[1]) if rng.random() < 0.7 else levels,
        memory=math.inf if rng.random() < 0.35 else float(int(whole * rng.uniform(0.5, 2.0)) + 20),
        overlap=rng.choice([1.0, 1.0, 0.0, 0.5]),
        state=state,
        inference=schedule is None and rng.random() < 0.1,
        max_replicas=rng.choice([None, None, None, 1, 2]),
        recompute=rng.random() < 0.6,
        boundary=rng.choice(["single", "parallel"]),
        schedule=chosen,
        accumulate=rng.choice([1, 2, 3, 4, 6, 8, 12]) if chosen in ACCUMULATING else None,
        **_constraints(len(made), math.prod(shape), rng),
    )


def corrected_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Like `mixed_instance` or `unequal_instance`, with old gradients corrected, and memory that binds more often."""
    rng = random.Random(f"corrected {seed}")
    chosen = schedule or rng.choice(("1f1b-stashing", "2bw"))
    found = (mixed_instance, unequal_instance)[rng.random() < 0.3](seed, layers=layers, schedule=chosen)
    whole = sum(layer["s"] + layer["w"] * (3 + found.state) for layer in found.layers)
    memory = found.memory if rng.random() < 0.3 else float(int(whole * rng.uniform(0.4, 1.6)) + 20)
    return replace(found, inference=False, corrected=True, memory=memory)


def divided_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Like the others, with large optimiser state that replicas divide, and memory that binds more often."""
    rng = random.Random(f"divided {seed}")
    draw = rng.choice([mixed_instance, mixed_instance, unequal_instance, crowded_instance])
    found = draw(seed, layers=layers, schedule=schedule or rng.choice(ALL_SCHEDULES))
    state = rng.choice([1.0, 2.0, 4.0])
    whole = sum(layer["s"] + layer["w"] * (3 + state) for layer in found.layers)
    memory = found.memory if rng.random() < 0.2 else float(int(whole * rng.uniform(0.35, 1.5)) + 20)
    return replace(found, inference=False, state=state, divided=True, memory=memory)


def tied_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Like the others, with weights that two or three layers share, large enough to matter."""
    rng = random.Random(f"tied {seed}")
    draw = rng.choice([mixed_instance, mixed_instance, unequal_instance, crowded_instance])
    found = draw(seed, layers=layers, schedule=schedule or rng.choice(["gpipe", "1f1b-flush", "1f1b-flush"]))
    made, tied = [dict(layer) for layer in found.layers], []
    for _ in range(rng.choice([1, 1, 2])):
        if len(made) > 1:
            sharing = tuple(sorted(rng.sample(range(len(made)), min(len(made), rng.choice([2, 2, 3])))))
            size = float(rng.choice([5, 30, 100, 300]))
            made[sharing[0]]["w"] += size
            tied.append((sharing, size))
    return replace(found, layers=made, tied=tuple(tied))


def hasty_instance(seed: int, *, layers: int = 4, schedule: str) -> Instance:
    """One to three minibatches per update, a given number of stages, and layers so small that what the executor does
    for each stage is most of a batch. A search that gives up too early finds nothing, because no stage is a plan.
    """
    rng = random.Random(f"hasty {seed}")
    draw = rng.choice([mixed_instance, unequal_instance, tied_instance])
    found = draw(seed, layers=layers, schedule=schedule)
    workers = sum(one.workers for one in found.servers) or math.prod(int(level[0]) for level in found.levels)
    free = {"together": (), "joined": (), "no_cut_after": (), "pins": (), "max_stages": None, "max_workers": None}
    count = min(len(found.layers), workers, rng.choice([2, 3, 3, 4]))
    found = replace(found, **free, stages=count, accumulate=rng.choice([1, 1, 2, 3]))
    work = sum(layer["f"] + layer["b"] for layer in found.layers) * rng.choice([0.3, 3.0])
    costs = work, rng.choice([0.0, work]), rng.choice([0.0, 0.1]), 0.0
    return replace(found, executor=costs, step=rng.choice([0.0, work]), sample=rng.choice([0.0, 1.0]))


def unequal_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Like `mixed_instance`, on two or three servers that differ in devices, their number, links and cards."""
    rng = random.Random(f"unequal {seed}")
    found = mixed_instance(seed, layers=layers, schedule=schedule)
    kinds = [
        Machine(
            rng.choice([1, 2, 2, 3]),
            rng.choice([1.0, 1.0, 0.5, 2.0]),
            1.0 if math.isinf(found.memory) else rng.choice([1.0, 1.0, 0.5, 2.0]),
            _level(rng, 0)[1:],
            rng.choice([0.0, 0.0, 3.0, 10.0]),
        )
        for _ in range(2)
    ]
    above: list[tuple[float, ...]] = [_level(rng, 2)] if rng.random() < 0.7 else [_level(rng, 3)]
    if rng.random() < 0.15:
        above = [_level(rng, 2), _level(rng, 2)]
        kinds = [replace(kind, workers=1) for kind in kinds]
    servers = [rng.choice(kinds) for _ in range(math.prod(int(level[0]) for level in above))]
    if sum(machine.workers for machine in servers) > 6:
        servers = [replace(machine, workers=min(2, machine.workers)) for machine in servers]
    return replace(found, levels=[(0, 0.0, 0.0), *above], servers=tuple(servers))


def crowded_instance(seed: int, *, layers: int = 6, schedule: str | None = None) -> Instance:
    """Like the others, with cards that carry much from several workers at once, and charged for it. Workers of two
    thirds share their server's cores."""
    draw = unequal_instance if seed % 2 else mixed_instance
    found = draw(seed, layers=layers, schedule=schedule)
    tensors = [(source, to, 2 * size, 2 * gradient) for source, to, size, gradient in found.tensors]
    levels = [(count, rate / 2, *rest) for count, rate, *rest in found.levels]
    several = min(2 + seed % 2, len(found.layers))
    free = {"together": (), "joined": (), "no_cut_after": (), "pins": (), "max_stages": None, "max_workers": None}
    wide = {"levels": levels, "stages": several, "boundary": "parallel", "cores": seed % 3}
    return replace(found, **free, tensors=tensors, contention=True, **wide)


def burdened(instance: Instance, seed: int) -> Instance:
    """The problem with work of the executor's own; in part also with its memory, and with shared cores."""
    rng = random.Random(f"executor {seed}")
    costs = (rng.choice([0.0, 1.0, 4.0]), rng.choice([0.0, 0.5, 2.0]), rng.choice([0.0, 0.1]), rng.choice([0.0, 0.05]))
    found = replace(instance, executor=costs, cores=rng.choice([0, 1.25, 2]))
    found = replace(found, sample=rng.choice([0.0, 0.5, 2.0]), step=rng.choice([0.0, 1.0]))
    if math.isinf(found.memory):
        return found
    return replace(
        found,
        worker=found.memory * rng.choice([0.0, 0.125, 0.25]),
        share=rng.choice([0.0, 0.25]),
        kept=rng.choice([0.0, 0.5]),
    )


def roomy(instance: Instance, seed: int) -> Instance:
    """The problem with layers that need memory while they run, those of some a large part of all that there is."""
    rng = random.Random(f"workspace {seed}")
    most = 1000 if math.isinf(instance.memory) else instance.memory
    sizes = [float(int(most * share)) for share in (0.0, 0.1, 0.3, 0.6)]
    return replace(instance, layers=[layer | {"x": rng.choice(sizes)} for layer in instance.layers])


def _level(rng: random.Random, count: int) -> tuple[float, ...]:
    efficiencies = (1.0, 1.0) if rng.random() < 0.7 else (rng.choice([0.5, 0.8]), rng.choice([0.5, 1.0]))
    return (count, float(rng.choice([4, 8, 20, 100])), rng.choice([0.0, 0.0, 0.5]), *efficiencies)


def _tensors(rng: random.Random, count: int) -> list[tuple[int, tuple[int, ...], float, float]]:
    """Mostly a chain, with shortcuts; two tensors of one layer now and then."""
    found = []
    for source in range(count - 1):
        for _ in range(rng.choice([1, 1, 1, 2])):
            targets = {source + 1} if rng.random() < 0.8 else set()
            targets |= {target for target in range(source + 1, count) if rng.random() < 0.15}
            if targets:
                found.append((source, tuple(sorted(targets)), float(rng.randint(0, 30)), float(rng.randint(0, 30))))
    return found


def _constraints(count: int, workers: int, rng: random.Random) -> dict[str, Any]:
    """What a user may ask for; none of it in half of the draws."""
    if rng.random() < 0.6:
        return {"together": (tuple(sorted(rng.sample(range(count), 2))),)} if count > 2 and rng.random() < 0.15 else {}
    chosen = rng.sample(range(count), min(count, rng.choice([1, 2])))
    some = tuple(sorted(chosen))
    return {
        "stages": rng.randint(1, 3) if rng.random() < 0.3 else None,
        "max_stages": rng.choice([None, None, 1, 2, 3]),
        "max_workers": rng.randint(1, workers) if rng.random() < 0.3 else None,
        "pins": tuple((layer, rng.randint(1, 3)) for layer in some) if rng.random() < 0.25 else (),
        "joined": (some,) if len(some) > 1 and rng.random() < 0.3 else (),
        "no_cut_after": some[:1] if rng.random() < 0.25 else (),
    }


def drawn(seed: int, draw: Callable[[int], Instance]) -> tuple[Instance, Problem]:
    """A random problem; the few that are refused (no work at all, stages beyond the layers) are drawn again."""
    for attempt in range(100):
        instance = draw(seed + 1_000_000 * attempt)
        try:
            return instance, to_problem(instance)
        except InputError:
            continue
    raise AssertionError("no valid instance in 100 draws")


def to_problem(instance: Instance) -> Problem:
    """The same problem in the planner's types. An infinite memory becomes an option, not a number."""
    profile = Profile(
        layers=tuple(
            Layer(
                *(f"l{i}", d["f"], d["b"], int(d["w"]), int(d["s"])),
                buffer_bytes=int(d["u"]),
                update_s=d.get("t", 0.0),
                workspace_bytes=int(d.get("x", 0)),
            )
            for i, d in enumerate(instance.layers)
        ),
        tensors=tuple(
            Tensor(f"t{k}", f"l{source}", tuple(f"l{c}" for c in targets), int(size), int(gradient))
            for k, (source, targets, size, gradient) in enumerate(instance.tensors)
        ),
        minibatch=1,
        optimizer_state_ratio=instance.state,
        together=tuple(tuple(f"l{i}" for i in group) for group in instance.together),
        tied=tuple(
            TiedWeights((f"w{number}",), tuple(f"l{i}" for i in group), int(size))
            for number, (group, size) in enumerate(instance.tied)
        ),
    )
    unlimited = math.isinf(instance.memory)
    options = Options(
        inference=instance.inference,
        overlap=instance.overlap,
        memory=not unlimited,
        stages=instance.stages,
        max_replicas=instance.max_replicas,
        allow_copies=instance.allow_copies,
        schedule=instance.schedule,
        accumulate=instance.accumulate,
        correction="ef" if instance.corrected else "none",
        sharding=Sharding.OPTIMIZER if instance.divided else Sharding.NONE,
        recompute=instance.recompute,
        contention=instance.contention,
        boundary=instance.boundary,
        max_stages=instance.max_stages,
        max_workers=instance.max_workers,
        pins=tuple((f"l{layer}", stage) for layer, stage in instance.pins),
        together=tuple(tuple(f"l{i}" for i in group) for group in instance.joined),
        no_cut_after=tuple(f"l{i}" for i in instance.no_cut_after),
        grid=instance.grid,
    )
    return Problem(profile, _cluster(instance), options)


def to_plan(instance: Instance, found: Best) -> Plan:
    """The oracle's plan in the planner's types."""
    stages = tuple(
        Stage(
            tuple(f"l{i}" for i in range(len(instance.layers)) if (stage.after & ~stage.before) >> i & 1),
            tuple(copy * found.size + one for one in range(stage.start, stage.end) for copy in range(found.copies)),
            depth,
            max(1, versions),
            stage.recompute,
        )
        for stage, depth, versions in zip(found.stages, found.depths, found.versions, strict=True)
    )
    schedule = "1f1b-stashing" if instance.inference else instance.schedule
    accumulate = instance.accumulate if instance.kind in ACCUMULATING else None
    return Plan(stages, found.copies, instance.inference, schedule, accumulate)


def _cluster(instance: Instance) -> Cluster:
    memory = 1.0 if math.isinf(instance.memory) else instance.memory
    levels = [Level(f"n{i}", int(count), *rates) for i, (count, *rates) in enumerate(instance.levels)]
    memory_costs = instance.worker, instance.share, instance.kept
    # What the oracle charges for samples is the sum of two figures here, and what it charges for copies likewise where
    # updates are corrected.
    handling, reading = 0.75 * instance.sample, 0.25 * instance.sample
    *work, copying = instance.executor
    copying, correcting = (0.375 * copying, 0.625 * copying) if instance.corrected else (copying, 7.0 * copying)
    executor = ExecutorCosts(*work, copying, "", *memory_costs, handling, instance.step, reading, correcting)
    if not instance.servers:
        return Cluster("test", Device("d", "cpu", int(memory), cores=instance.cores), tuple(levels), executor=executor)
    machines = [
        Server(
            Device(f"d{one.speed}-{one.memory}", "cpu", int(memory * one.memory), one.speed, instance.cores),
            Level("server", one.workers, *one.level),
            one.card,
        )
        for one in instance.servers
    ]
    return Cluster.of_servers("test", machines, levels[1:], executor)
