"""The seconds of training until a loss, on slow links, by the way to train: adapters, a small GPT and a small ViT.

    PYTHONPATH=tests/support python tests/benchmarks/time_to_result.py FILE [--rows WORD] [--show]

A row is a model, a number of workers and a link. The links are slow in proportion to these small models: the seconds of
an exchange of all gradients, over those of computing, are the ratio that a large model of the same kind has on A100s
with links of 1 or 10 Gbit/s (`MODELS`). Links are network namespaces joined by shaped virtual cables.

The seconds to a loss are the updates until it, times the seconds of an update. Updates are counted in one process, as
all ways but those with bfloat16 gradients compute the same update: a test loss is read every few updates, and between
two readings it is taken for a straight line. Seconds of an update are measured with the workers, and links, of the row.
Ways run in turns. A way with four times the batch has twice the rate, as is common for AdamW.

pipeplan runs what `profile`, `solve` and launch.sh make of the model, without further options, and with `--compress
bf16` where the answer shows that DDP with it is faster. Four workers share the two cores of a small machine, and the
cluster file states their speed as it was measured with all of them busy.

Each measurement is added to FILE, a JSON object a line, and is not made again. Everything takes about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jobs
import peers_torch
import torch
from jobs import BASE, JOBS, SUBJECTS
from peers_run import INSIDE, Ground, Here, Shaped, cluster_file, in_own_network, pipeplan, read_run, torchrun
from torch import Tensor, nn

from pipeplan_launch.job.job import Job
from pipeplan_launch.plan.stage_files import load_plan

A100_FLOPS = 0.4 * 312e12
"""Of training in bfloat16, at 40% of the peak."""


@dataclass(frozen=True)
class Model:
    """A small model, the large one that it stands for, and the loss to reach."""

    job: str
    stands_for: str
    weights: float
    """Trained weights of the large model; their gradients have four bytes each."""
    compute_s: float
    """Seconds of computing of an update on each A100."""
    goal: float
    """Test loss."""
    every: int
    """Updates between two readings of the test loss."""

    @property
    def bytes_per_compute_s(self) -> float:
        """Bytes of gradients for each second of computing."""
        return 4 * self.weights / self.compute_s


MODELS = {
    "GPT": Model("small_gpt", "GPT-2, 8 x 1,024 tokens", 124e6, 6 * 124e6 * 8192 / A100_FLOPS, 2.2, 4),
    "ViT": Model("small_vit", "ViT-B/16, 64 images", 86e6, 6 * 86e6 * 64 * 197 / A100_FLOPS, 0.5, 4),
    "LoRA": Model("small_lora", "Llama-3 8B, rank 16, 4 x 1,024 tokens", 42e6, 4 * 8e9 * 4096 / A100_FLOPS, 1.5, 4),
}
"""Six operations a weight and token; four where the weights are frozen."""
LINKS = {"10 Gbit/s": 10e9 / 8, "1 Gbit/s": 1e9 / 8}
"""Bytes a second."""
UPDATES = {"10 Gbit/s": 6, "1 Gbit/s": 4}
"""Measured of every way, after those that are left out."""
WARM, MOST_UPDATES, BASE_UPDATES = 2, 400, 300


@dataclass(frozen=True)
class Way:
    """One way to train."""

    peer: str | None = None
    """A contender of peers_torch.py, with as many microbatches as it has after the colon; None for pipeplan."""
    times: int = 1
    """The batch, over that of the row."""
    rounded: bool = False
    """Whether gradients are exchanged in bfloat16."""

    def contender(self, workers: int) -> str:
        """With the number of microbatches."""
        assert self.peer is not None
        return self.peer.format(twice=2 * workers)


WAYS: Mapping[str, Way] = {
    "DDP": Way("ddp:1"),
    "DDP, 4 x the batch, bfloat16 gradients": Way("ddp-bf16:4", 4, rounded=True),
    "FSDP2": Way("fsdp2:1"),
    "torch 1F1B": Way("1f1b:{twice}"),
    "torch 1F1B, 4 x the batch": Way("1f1b:{twice}", 4),
    "pipeplan": Way(),
    "pipeplan, 4 x the batch": Way(times=4),
    "pipeplan, bfloat16 gradients": Way(rounded=True),
    "pipeplan, 4 x the batch, bfloat16 gradients": Way(times=4, rounded=True),
}
"""pipeplan's ways with bfloat16 gradients are measured where its answer shows that they are faster."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    model: str
    workers: int
    link: str

    @property
    def name(self) -> str:
        """As in the file."""
        return f"{self.model}, {self.workers} workers, {self.link}"

    def updates(self, times: int) -> int:
        """Updates that are measured of a way with `times` times the batch. Those of adapters are short."""
        return UPDATES[self.link] * (8 if self.model == "LoRA" and times == 1 else 1)

    @property
    def batch(self) -> int:
        """Samples of an update, over all workers."""
        return SUBJECTS[MODELS[self.model].job].batch * self.workers // 2


ROWS = tuple(Row(*one) for one in product(MODELS, (2, 4), LINKS))


class Results:
    """What was measured: a JSON object a line, found by its key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._values: dict[str, Any] = {one["key"]: one["value"] for one in map(json.loads, lines)}

    def get(self, *key: object) -> Any:
        """The value, or None."""
        return self._values.get(" | ".join(map(str, key)))

    def add(self, value: object, *key: object) -> None:
        """Write a value down."""
        name = " | ".join(map(str, key))
        self._values[name] = value
        with self._path.open("a") as file:
            file.write(json.dumps({"key": name, "value": value}) + "\n")
        print(f"{name}: {value}", file=sys.stderr, flush=True)


# Updates until the loss, in one process.


def updates_to_goal(model: Model, batch: int, shares: int, seed: int) -> float | None:
    """Updates until the test loss is that of the goal; None where it is not in `MOST_UPDATES`.

    With `shares`, the gradient is the mean of so many workers' gradients, each rounded to bfloat16, as is their mean.
    """
    torch.manual_seed(seed)
    job: Job = getattr(jobs, model.job)()
    trained = [one for one in job.model.parameters() if one.requires_grad]
    optimizer = job.make_optimizer(trained)
    if batch >= 4 * SUBJECTS[model.job].batch:
        optimizer.param_groups[0]["lr"] *= 2
    before: tuple[int, float] | None = None
    for update, (inputs, target) in enumerate(minibatches(job, batch, seed)):
        if update % model.every == 0:
            loss = test_loss(job)
            if loss <= model.goal:
                return float(update) if before is None else crossing(before, (update, loss), model.goal)
            before = update, loss
        if update == MOST_UPDATES:
            return None
        optimizer.zero_grad()
        backward(job, inputs, target, trained, shares)
        optimizer.step()
    raise AssertionError("minibatches never end")


def crossing(before: tuple[int, float], after: tuple[int, float], goal: float) -> float:
    """Where the straight line between two readings has the goal."""
    return before[0] + (after[0] - before[0]) * (before[1] - goal) / (before[1] - after[1])


def minibatches(job: Job, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole minibatches of shuffled epochs, without end."""
    train: Any = job.datasets.train
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(train), generator=generator).split(batch):
            if len(chosen) == batch:
                yield train[chosen]


def backward(job: Job, inputs: Tensor, target: Tensor, trained: Sequence[nn.Parameter], shares: int) -> None:
    """Set the gradients of a minibatch."""
    assert job.loss is not None
    if not shares:
        job.loss(job.model(inputs), target).backward()
        return
    total = [torch.zeros_like(one, dtype=torch.bfloat16) for one in trained]
    for own, wanted in zip(inputs.chunk(shares), target.chunk(shares), strict=True):
        loss = job.loss(job.model(own), wanted)
        for one, gradient in zip(total, torch.autograd.grad(loss, trained), strict=True):
            one += (gradient / shares).bfloat16()
    for parameter, gradient in zip(trained, total, strict=True):
        parameter.grad = gradient.float()


@torch.no_grad()
def test_loss(job: Job) -> float:
    """The mean over the test samples."""
    test: Any = job.datasets.test
    inputs, target = test[:]
    assert job.loss is not None
    return float(job.loss(job.model(inputs), target))


def make_base(path: Path) -> None:
    """Train the language model that the adapters change, and write its weights."""
    torch.manual_seed(0)
    job = jobs.small_gpt()
    optimizer = job.make_optimizer(list(job.model.parameters()))
    for _, (inputs, target) in zip(range(BASE_UPDATES), minibatches(job, job.minibatch or 1, 0), strict=False):
        optimizer.zero_grad()
        backward(job, inputs, target, (), 0)
        optimizer.step()
    torch.save(job.model.state_dict(), path)


def count_updates(results: Results, rows: Sequence[Row], seeds: int) -> None:
    """Fill in the updates of all seeds, for the ways whose seconds were measured."""
    for row, (name, way), seed in product(rows, WAYS.items(), range(seeds)):
        if results.get("seconds", row.name, name, 0) is None:
            continue
        key = (row.model, row.batch * way.times, row.workers * way.rounded, seed)
        if results.get("updates", *key) is None:
            results.add(updates_to_goal(MODELS[row.model], *key[1:]), "updates", *key)


# Seconds of an update, with the workers of a row.


def peer_seconds(ground: Ground, row: Row, names: Sequence[str], updates: int, folder: Path) -> dict[str, float]:
    """Seconds of an update of peers with the same batch, which one set of processes runs in turn."""
    ways = [WAYS[name] for name in names]
    options = ["--subject", MODELS[row.model].job, "--write", str(folder / "peers.json"), "--keep-memory"]
    options += ["--contenders", ",".join(way.contender(row.workers) for way in ways)]
    options += ["--batch", str(row.batch * ways[0].times), "--updates", str(WARM + updates)]
    ground.run((*torchrun(ground, row.workers), peers_torch.__file__, *options))
    found = json.loads((folder / "peers.json").read_text())
    return {
        name: seconds_each(found[way.contender(row.workers)]["ends"]) for name, way in zip(names, ways, strict=True)
    }


def seconds_each(ends: Sequence[float]) -> float:
    """From one update to the next, without the warm ones."""
    return (ends[-1] - ends[WARM - 1]) / (len(ends) - WARM)


def alone_s(model: Model, workers: int, batch: int, folder: Path) -> float:
    """Seconds of computing of an update while so many workers compute at the same time."""
    options = ("--subject", model.job, "--contenders", "alone:1", "--batch", str(batch), "--updates", str(WARM + 10))
    write = folder / "alone.json"
    Here().run((*torchrun(Here(), workers), peers_torch.__file__, *options, "--write", str(write), "--keep-memory"))
    return seconds_each(json.loads(write.read_text())["alone:1"]["ends"])


def measure_computing(results: Results, row: Row) -> None:
    """Fill in the seconds of computing of an update on a worker, alone and with all workers busy."""
    model = MODELS[row.model]
    if results.get("computing, s", row.model, row.workers) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        one = alone_s(model, 1, row.batch // row.workers, Path(folder))
        results.add(one, "computing alone, s", row.model, row.workers)
        results.add(alone_s(model, row.workers, row.batch, Path(folder)), "computing, s", row.model, row.workers)


def link_rate(results: Results, row: Row) -> float:
    """Bytes a second of the links of a row."""
    model = MODELS[row.model]
    parameters = getattr(jobs, model.job)().model.parameters()
    gradients = sum(4 * one.numel() for one in parameters if one.requires_grad)
    own = gradients / float(results.get("computing, s", row.model, row.workers))
    return LINKS[row.link] * own / model.bytes_per_compute_s


def write_plan(results: Results, row: Row, way: Way, rate: float, folder: Path) -> Path:
    """What `profile` and `solve` make of the model for this cluster; returns the plan folder."""
    model, plan = MODELS[row.model], folder / f"plan-{way.times}"
    profile, cluster = folder / "profile.json", folder / "cluster.toml"
    share = row.batch // row.workers
    if not profile.exists():
        sizes = [share >> halved for halved in range(share.bit_length()) if share >> halved]
        pipeplan("profile", f"{JOBS}:{model.job}", "--microbatch", ",".join(map(str, sizes)), "-o", profile)
        computing = [results.get(key, row.model, row.workers) for key in ("computing alone, s", "computing, s")]
        text = cluster_file(f"{rate * 8 / 1e6:.4f} Mbit/s", row.workers)
        cluster.write_text(text.replace('kind = "cpu"\n', f'kind = "cpu"\nspeed = {computing[0] / computing[1]:.3f}\n'))
    pipeplan("solve", profile, "--cluster", cluster, "--batch", row.batch * way.times, "-o", plan)
    return plan


def advises_rounding(plan: Path) -> bool:
    """Whether the answer is DDP, and says that it would be faster with gradients in bfloat16."""
    choice = json.loads((plan / "plan.json").read_text())["choice"]
    return choice["taken"] == "DDP" and choice["rounded"] is not None


def plan_seconds(ground: Shaped, plan: Path, batch: int, updates: int, *options: str) -> float:
    """Seconds of an update of a run of a plan, with further options of launch.sh."""
    shutil.rmtree(plan / "run", ignore_errors=True)
    group = batch // load_plan(plan).minibatch
    count = (WARM + updates) * group
    options += ("--epochs", "1", "--max-minibatches", str(count), "--log-every", "0", "--run-dir", str(plan / "run"))
    # A plan may leave servers idle.
    command, servers = ("bash", str(plan / "launch.sh"), *options), load_plan(plan).servers
    if servers > 1:
        ground.run(command, first=servers)
    else:
        Here().run(command)
    return seconds_each(read_run(plan, plan / "run", group).ends)


def measure(results: Results, row: Row, turns: int) -> None:
    """Fill in the seconds of an update of all ways of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rate = link_rate(results, row)
        ground = Shaped(f"{rate * 8 / 1e3:.0f}kbit", row.workers, burst="20k")
        peers: dict[int, list[str]] = {}
        for name, way in WAYS.items():
            if way.peer:
                peers.setdefault(way.times, []).append(name)
        for turn in range(turns):
            for times, names in peers.items():
                if results.get("seconds", row.name, names[0], turn) is None:
                    for name, seconds in peer_seconds(ground, row, names, row.updates(times), folder).items():
                        results.add(seconds, "seconds", row.name, name, turn)
            for name, way in WAYS.items():
                if way.peer is None and results.get("seconds", row.name, name, turn) is None:
                    plan = folder / f"plan-{way.times}"
                    if not plan.exists():
                        write_plan(results, row, way, rate, folder)
                        results.add(load_plan(plan).written(), "plan", row.name, name)
                    if way.rounded and not advises_rounding(plan):
                        continue
                    options = ("--compress", "bf16") if way.rounded else ()
                    seconds = plan_seconds(ground, plan, row.batch * way.times, row.updates(way.times), *options)
                    results.add(seconds, "seconds", row.name, name, turn)


# The table.


def seconds_to_goal(results: Results, row: Row, name: str, seeds: int, turns: int) -> list[float]:
    """Of each seed; empty where something was not measured, or a seed did not reach the goal."""
    way = WAYS[name]
    key = (row.model, row.batch * way.times, row.workers * way.rounded)
    updates = [results.get("updates", *key, seed) for seed in range(seeds)]
    each = [results.get("seconds", row.name, name, turn) for turn in range(turns)]
    if None in updates or None in each:
        return []
    return [count * statistics.median(each) for count in updates]


def table(results: Results, rows: Sequence[Row], seeds: int, turns: int) -> str:
    """A Markdown table: mean seconds to the goal over the seeds, smallest and largest; and pipeplan's plan."""
    lines = [
        "| row | way | updates | s per update | s to the loss | times as fast as DDP | plan |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = {name: seconds_to_goal(results, row, name, seeds, turns) for name in WAYS}
        means = {name: statistics.fmean(seconds) for name, seconds in found.items() if seconds}
        for name, mean in means.items():
            each = statistics.median(results.get("seconds", row.name, name, turn) for turn in range(turns))
            mark = "**" if mean == min(means.values()) else ""
            spread = f"{mark}{mean:.1f}{mark} ({min(found[name]):.1f}-{max(found[name]):.1f})"
            faster = f"{means['DDP'] / mean:.2f}" if "DDP" in means else ""
            plan = results.get("plan", row.name, name) or ""
            lines.append(f"| {row.name} | {name} | {mean / each:.0f} | {each:.3g} | {spread} | {faster} | {plan} |")
    return "\n".join(lines)


def main() -> int:
    """Make the measurements that are missing and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", default="", help="those whose names have this text, such as 'LoRA, 2'")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the table only")
    given = parser.parse_args()
    rows = [row for row in ROWS if given.rows in row.name]
    base = given.file.with_suffix(".base.pt").absolute()
    os.environ[BASE] = str(base)
    if os.environ.get(INSIDE):
        for row in rows:
            measure(Results(given.file), row, given.turns)
        return 0
    if not given.show:
        if not base.exists():
            make_base(base)
        for row in rows:
            measure_computing(Results(given.file), row)
            # A network of its own for each row, which ends with its process.
            if status := in_own_network([str(given.file), "--rows", row.name, "--turns", str(given.turns)]):
                return status
        count_updates(Results(given.file), rows, given.seeds)
    print(table(Results(given.file), rows, given.seeds, given.turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
