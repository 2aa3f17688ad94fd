"""Which synchronous schedule is chosen for two transformers on A100s, and how long that takes.

    python tests/benchmarks/synchronous_schedules.py [--limit 20]

Llama 7B on 4 servers of 8 and GPT-2 XL on 8 of 8, as chains of an embedding, two layers for each block and a head,
whose times are those of 150 TFLOP/s. For each candidate the table has the simulated throughput and the memory.
"""

from __future__ import annotations

import argparse
import itertools
import time

from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.planning.candidates import Machines
from pipeplan.planning.choose import Question, choose
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_size

FLOPS = 1.5e14
"""Operations in a second."""


def transformer(name: str, blocks: int, width: int, words: int, tokens: int) -> Profile:
    """A chain in bfloat16, one sample a minibatch, with fp32 weights and moments of Adam as the optimiser's state."""
    block_s, edge = 2 * 12 * width * width * tokens / FLOPS, tokens * width * 2
    head_s = 2 * words * width * tokens / FLOPS
    layers = [Layer("embed", 1e-4, 3e-4, words * width * 2, edge)]
    for number in range(blocks):
        layers.append(Layer(f"{number}.attend", block_s / 3, block_s * 2 / 3, 8 * width * width, 11 * edge))
        layers.append(Layer(f"{number}.mlp", block_s * 2 / 3, block_s * 4 / 3, 16 * width * width, 23 * edge))
    layers.append(Layer("head", head_s, 2 * head_s, words * width * 2, edge + 4 * tokens * words))
    tensors = (Tensor(one.name, one.name, (other.name,), edge, edge) for one, other in itertools.pairwise(layers))
    return Profile(
        layers=tuple(layers), tensors=tuple(tensors), minibatch=1, optimizer_state_ratio=6.0, model_name=name
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for a choice")
    given = parser.parse_args()
    table = Table("model, workers, batch", "s", "candidate", "plan", "microbatch", "samples/s", "memory")
    cases = (
        (transformer("Llama 7B", 32, 4096, 32000, 2048), 4),
        (transformer("GPT-2 XL", 48, 1600, 50257, 1024), 8),
    )
    for (profile, servers), batch in itertools.product(cases, (64, 256)):
        levels = (Level("server", 8, 250e9), Level("cluster", servers, 25e9))
        cluster, begun = Cluster("a100", Device("A100", "cuda", 80 * 2**30), levels), time.perf_counter()
        choice = choose(Question(Machines(profile, cluster), Options(), batch), Deadline.after(given.limit))
        took = f"{time.perf_counter() - begun:.1f}"
        for number, one in enumerate(choice.rivals):
            first = (f"{profile.model_name}, {servers} × 8, {batch}", took) if number == 0 else ("", "")
            memory = show_size(max(stage.memory_bytes for stage in evaluate(one.plan, one.problem).stages))
            size, rate = str(one.problem.profile.minibatch), f"{1 / one.sample_s:.1f}"
            taken = " (taken)" if one is choice.taken else ""
            table.add_row(*first, f"{one.kind}{taken}", one.plan.config, size, rate, memory)
        table.add_section()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
