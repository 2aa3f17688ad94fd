"""Does a pipeline keep its pace where network cards carry several things? Messages and rings as flows that share cards.

    python tests/benchmarks/shared_cards.py

Replays the executor's own action streams on servers of 4 workers. A message is a flow from its sender's card to its
receiver's, an all-reduce one flow through every card of its ring at a common rate, since each member waits for its
neighbour chunk by chunk. Traffic inside a server is free. How flows share a card:

    fair      max-min fair shares, as TCP settles at
    first     what began first takes what it can, the others what is left
    ring      an all-reduce goes first, then as `first`
    messages  messages go first

A window of 2 is the executor's: a worker has the receives of two activations posted, and messages beyond these wait at
their senders (so does Gloo: it sends only into posted receives). All figures are shares of the planner's pace with
contention, at the planner's depths or deeper ones.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan_launch.plan.schedule import SCHEDULES, Action, ActionKind, StageShape

EPSILON = 1e-12
Card = tuple[int, bool]
"""Server, and whether it is the outgoing direction."""


@dataclass(frozen=True)
class Setting:
    """A plan with its times, in seconds, on servers of `per_server` workers in order."""

    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_s: tuple[float, ...]
    """Of one message forward across each boundary, with a card alone."""
    gradient_s: tuple[float, ...]
    """Of one message back."""
    ring_s: tuple[float, ...]
    """Of each stage's all-reduce, alone."""
    per_server: int
    window: int = 1 << 30
    """Receives of activations that a worker posts ahead: messages beyond these wait at their senders."""

    def server(self, stage: int, replica: int) -> int:
        """Where a replica is."""
        return (sum(self.replicas[:stage]) + replica) // self.per_server

    def ring_cards(self, stage: int) -> tuple[Card, ...]:
        """The cards that the ring of a stage passes."""
        servers = sorted({self.server(stage, replica) for replica in range(self.replicas[stage])})
        return tuple((server, out) for server in servers for out in (False, True)) if len(servers) > 1 else ()


@dataclass
class Flow:
    """Something under way; `left` is the time that it still needs with its cards alone."""

    cards: tuple[Card, ...]
    left: float
    is_ring: bool
    done: Callable[[], None]
    rate: float = field(default=0.0)


def share_fairly(flows: Sequence[Flow]) -> None:
    """Max-min fair rates by progressive filling: the card with the least for each of its flows is filled first."""
    free: dict[Card, float] = defaultdict(lambda: 1.0)
    open_flows = list(flows)
    while open_flows:
        count: dict[Card, int] = defaultdict(int)
        for flow in open_flows:
            for card in flow.cards:
                count[card] += 1
        card = min(count, key=lambda one: (free[one] / count[one], one))
        rate = free[card] / count[card]
        for flow in [flow for flow in open_flows if card in flow.cards]:
            flow.rate = rate
            open_flows.remove(flow)
            for crossed in flow.cards:
                free[crossed] = max(0.0, free[crossed] - rate)


def share_in_order(flows: Sequence[Flow]) -> None:
    """Each in turn takes what its cards still have."""
    free: dict[Card, float] = defaultdict(lambda: 1.0)
    for flow in flows:
        flow.rate = min(free[card] for card in flow.cards)
        for card in flow.cards:
            free[card] -= flow.rate


SHARING: dict[str, Callable[[Sequence[Flow]], None]] = {
    "fair": share_fairly,
    "first": share_in_order,
    "ring": lambda flows: share_in_order(sorted(flows, key=lambda flow: not flow.is_ring)),
    "messages": lambda flows: share_in_order(sorted(flows, key=lambda flow: flow.is_ring)),
}


class Replay:
    """Runs every replica's stream; computing and flows advance together."""

    def __init__(self, setting: Setting, sharing: str, minibatches: int) -> None:
        self.setting, self.share = setting, SHARING[sharing]
        shapes = [StageShape(*shape) for shape in zip(setting.replicas, setting.depths, strict=True)]
        stream = SCHEDULES["1f1b-stashing"].stream
        self.workers = [(stage, replica) for stage, count in enumerate(setting.replicas) for replica in range(count)]
        self.todo = {worker: list(stream(shapes, *worker, minibatches))[::-1] for worker in self.workers}
        self.here: set[tuple[int, int, Action]] = set()
        self.posted = {worker: setting.window * setting.replicas[worker[0]] + worker[1] for worker in self.workers}
        self.held: dict[tuple[int, int], dict[int, Callable[[], None]]] = defaultdict(dict)
        self.joined: dict[tuple[int, int], int] = defaultdict(int)
        self.busy: set[tuple[int, int]] = set()
        self.flows: list[Flow] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.now = 0.0
        self.ends: list[float] = []
        self.carried: dict[Card, float] = defaultdict(float)

    def run(self) -> list[float]:
        """When the first stage ends each backward pass."""
        for worker in self.workers:
            self._advance(worker)
        while self.events or self.flows:
            if self.flows:
                self.share(self.flows)
            soonest = min((flow.left / flow.rate for flow in self.flows if flow.rate > EPSILON), default=float("inf"))
            event_s = self.events[0][0] if self.events else float("inf")
            step = min(soonest, event_s - self.now)
            self.now += step
            for flow in self.flows:
                flow.left -= step * flow.rate
                for card in flow.cards:
                    self.carried[card] += step * flow.rate
            finished = [flow for flow in self.flows if flow.left <= EPSILON]
            self.flows = [flow for flow in self.flows if flow.left > EPSILON]
            for flow in finished:
                flow.done()
            while self.events and self.events[0][0] <= self.now + EPSILON:
                heapq.heappop(self.events)[2]()
        assert not any(self.todo.values()), "the replay stands still"
        return self.ends

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.number), happen))

    def _flow(self, cards: tuple[Card, ...], seconds: float, is_ring: bool, done: Callable[[], None]) -> None:
        if cards and seconds > 0:
            self.flows.append(Flow(cards, seconds, is_ring, done))
        else:
            self._after(0.0, done)

    def _advance(self, worker: tuple[int, int]) -> None:
        stage, _ = worker
        todo = self.todo[worker]
        while todo and worker not in self.busy:
            action = todo[-1]
            boundary = {ActionKind.FORWARD: stage - 1, ActionKind.BACKWARD: stage}.get(action.kind)
            waits = action.kind is ActionKind.UPDATE or (
                boundary is not None and 0 <= boundary < len(self.setting.activation_s)
            )
            if waits and (*worker, action) not in self.here:
                return
            todo.pop()
            self.here.discard((*worker, action))
            if action.kind is ActionKind.FORWARD and stage > 0:
                self._post(worker)
            if action.kind is ActionKind.REDUCE:
                self._reduce(stage, action.index)
            elif action.kind is not ActionKind.UPDATE:
                times = self.setting.forward_s if action.kind is ActionKind.FORWARD else self.setting.backward_s
                self.busy.add(worker)
                self._after(times[stage], lambda done=action: self._computed(worker, done))  # type: ignore[misc]

    def _post(self, worker: tuple[int, int]) -> None:
        """One message has been taken: the next receive is posted, and its message, if it is due, sets off."""
        start = self.held[worker].pop(self.posted[worker], None)
        self.posted[worker] += self.setting.replicas[worker[0]]
        if start is not None:
            start()

    def _computed(self, worker: tuple[int, int], action: Action) -> None:
        self.busy.discard(worker)
        stage = worker[0]
        other = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
        if action.kind is ActionKind.BACKWARD and stage == 0:
            self.ends.append(self.now)
        if 0 <= other < len(self.setting.replicas):
            receiver = other, action.index % self.setting.replicas[other]
            source, target = self.setting.server(*worker), self.setting.server(*receiver)
            cards = ((source, True), (target, False)) if source != target else ()
            forward = action.kind is ActionKind.FORWARD
            sizes = self.setting.activation_s if forward else self.setting.gradient_s
            message_s = sizes[min(stage, other)]

            def start() -> None:
                self._flow(cards, message_s, False, lambda: self._arrived(receiver, action))

            if forward and action.index >= self.posted[receiver]:
                self.held[receiver][action.index] = start
            else:
                start()
        self._advance(worker)

    def _arrived(self, worker: tuple[int, int], action: Action) -> None:
        self.here.add((*worker, action))
        self._advance(worker)

    def _reduce(self, stage: int, group: int) -> None:
        self.joined[stage, group] += 1
        count = self.setting.replicas[stage]
        if self.joined[stage, group] == count:

            def done() -> None:
                for replica in range(count):
                    self._arrived((stage, replica), Action(ActionKind.UPDATE, group))

            self._flow(self.setting.ring_cards(stage), self.setting.ring_s[stage] if count > 1 else 0.0, True, done)


def share(setting: Setting, sharing: str, pace_s: float) -> float:
    """The share of a predicted pace that a replay keeps, from its middle third."""
    round_ = math.lcm(*setting.replicas)
    count = max(600, 12 * round_)
    ends = sorted(Replay(setting, sharing, count).run())
    first = count // 3
    last = first + count // 3 // round_ * round_
    return pace_s * (last - first) / (ends[last] - ends[first])


def planned(setting: Setting) -> tuple[Setting, float]:
    """The planner's depths for a setting, and its pace with contention."""
    scale = 10**9  # bytes/s of a card, so that sizes in whole bytes are exact enough
    layers, tensors = [], []
    for index, replicas in enumerate(setting.replicas):
        ring = setting.ring_s[index] * scale * replicas / (2 * (replicas - 1)) if replicas > 1 else 0.0
        layers.append(Layer(f"l{index}", setting.forward_s[index], setting.backward_s[index], round(ring), 0))
    for index, sizes in enumerate(zip(setting.activation_s, setting.gradient_s, strict=True)):
        tensors.append(Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), *(round(size * scale) for size in sizes)))
    levels = (Level("server", setting.per_server, 1e6 * scale), Level("cluster", 4, scale))
    cluster = Cluster("", Device("", "cuda", 1), levels)
    problem = Problem(Profile(tuple(layers), tuple(tensors), 1), cluster, Options(memory=False))
    ends = list(itertools.accumulate(setting.replicas, initial=0))
    runs = [tuple(range(*pair)) for pair in itertools.pairwise(ends)]
    plan = Plan(tuple(Stage((f"l{index}",), run, 1, 1) for index, run in enumerate(runs)))
    # Deep enough for anything first: then the pace is that of the other resources.
    pace_s = evaluate(depths.assign_depths(plan, problem, 1e-6), problem).pace_s
    found = tuple(stage.depth for stage in depths.assign_depths(plan, problem, pace_s).stages)
    return replace(setting, depths=found), pace_s


def vgg(gigabits: float, activations: bool = True, gradients: bool = True, ring: bool = True) -> Setting:
    """VGG-16 on cluster A, 15-1, minibatch 64, from the published profile: 25 of 40 layers in the first stage."""
    message, reduced = 25690112 * 8e-9 / gigabits, 2 * 14 / 15 * 39980288 * 8e-9 / gigabits
    return Setting(
        replicas=(15, 1),
        depths=(1, 1),
        forward_s=(0.10965, 0.00730),
        backward_s=(0.20790, 0.01141),
        activation_s=(message * activations,),
        gradient_s=(message * gradients,),
        ring_s=(reduced * ring, 0.0),
        per_server=4,
    )


def balanced(replicas: tuple[int, ...], message: float, ring: float) -> Setting:
    """Stages whose computing takes 1 per minibatch, each boundary `message` with a card alone, each ring `ring`."""
    return Setting(
        replicas=replicas,
        depths=(1,) * len(replicas),
        forward_s=tuple(count / 3 for count in replicas),
        backward_s=tuple(2 * count / 3 for count in replicas),
        activation_s=(message,) * (len(replicas) - 1),
        gradient_s=(message,) * (len(replicas) - 1),
        ring_s=tuple(ring * count if count > 1 else 0.0 for count in replicas),
        per_server=4,
    )


UNLIMITED = 1 << 30
WAYS = [
    ("fair", 2),
    ("fair", 4),
    ("fair", UNLIMITED),
    ("first", UNLIMITED),
    ("ring", UNLIMITED),
    ("messages", UNLIMITED),
]
PLANS = [(15, 1), (12, 4), (8, 8), (4, 4, 4, 4), (8, 4, 4), (13, 3), (6, 6, 4), (3, 5, 8)]


def _title(sharing: str, window: int) -> str:
    return f"{sharing}, window {window}" if window < UNLIMITED else sharing


def one_plan() -> Table:
    """VGG-16's 15-1 at several bandwidths, with all its traffic and with parts of it."""
    table = Table("Gbit/s", "traffic", "pace", *(_title(*way) for way in WAYS), title="VGG-16 on cluster A, 15-1")
    parts = {
        "all": {},
        "no gradients": {"gradients": False},
        "no activations": {"activations": False},
        "no messages": {"activations": False, "gradients": False},
        "no all-reduce": {"ring": False},
    }
    for gigabits, (name, left_out) in itertools.product((10.0, 7.5, 5.45), parts.items()):
        setting, pace_s = planned(vgg(gigabits, **left_out))
        shares = [f"{share(replace(setting, window=window), how, pace_s):.2f}" for how, window in WAYS]
        table.add_row(f"{gigabits:g}", name, f"{pace_s * 1e3:.1f} ms", *shares)
    return table


def many_plans() -> Table:
    """Balanced plans with messages and all-reduces of various lengths: mean and worst share, by depth and sharing."""
    table = Table("depths", "sharing", "plans", "mean", "under 0.95", "worst", title="balanced plans on 4 servers of 4")
    settings = [planned(balanced(*made)) for made in itertools.product(PLANS, (0.3, 0.6, 0.9), (0.0, 0.1, 0.3, 0.6))]
    crossing = [sum(1 for ring, n in enumerate(one.ring_s) if n and one.ring_cards(ring)) > 0 for one, _ in settings]
    groups = {"no ring between servers": False, "rings between servers": True}
    for (group, rings), deeper, way in itertools.product(groups.items(), (0, 1, 3), (WAYS[0], WAYS[2], WAYS[3])):
        shares = []
        for (setting, pace_s), crosses in zip(settings, crossing, strict=True):
            if crosses is rings:
                count = len(setting.depths)
                more = tuple(depth + deeper * (count - 1 - index) for index, depth in enumerate(setting.depths))
                shares.append((share(replace(setting, depths=more, window=way[1]), way[0], pace_s), setting))
        least, worst = min(shares, key=lambda one: one[0])
        mean = sum(value for value, _ in shares) / len(shares)
        low = sum(value < 0.95 for value, _ in shares)
        what = f"planner's + {deeper}" if deeper else "the planner's"
        name = "-".join(map(str, worst.replicas))
        table.add_row(what, _title(*way), f"{len(shares)} {group}", f"{mean:.2f}", str(low), f"{least:.2f} ({name})")
    return table


def main() -> None:
    """Print both tables."""
    console = Console(width=150)
    console.print(one_plan())
    console.print(many_plans())


if __name__ == "__main__":
    main()
