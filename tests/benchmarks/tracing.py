"""How long it takes to trace a model into layers, to cut every layer out, and how much memory that needs.

    python tests/benchmarks/tracing.py [--runs N] [NAME …]

Each run is a fresh process with one thread: what torch imports when it first traces is in its time, building the model
and importing transformers is not. `CPU` is the time of the thread that traces, which others on the machine disturb
less.
`cut` is CPU time for a function of every layer by itself; the models of 12 and 48 blocks show how both grow. Models
whose parameters are on the meta device have no weights at all.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

AIMS = {"resnet50": 10, "gpt2": 10, "llama-7b": 120}


def _words(length: int, device: str = "cpu") -> Callable[[int], dict[str, Any]]:
    import torch

    return lambda n: {"input_ids": torch.zeros(n, length, dtype=torch.int64, device=device)}


def _hugging_face(kind: str, length: int, device: str = "cpu", **config: Any) -> Any:
    import torch
    import transformers

    from pipeplan_launch import Job

    with torch.device(device):
        settings = getattr(transformers, f"{kind}Config")(**config)
        heads = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
        model = getattr(transformers, kind + heads.get(kind, "ForCausalLM"))(settings)
    inputs = _words(length, device)
    if kind == "T5":
        one = inputs
        inputs = lambda n: {**one(n), "decoder_input_ids": one(n)["input_ids"]}  # noqa: E731
    return Job(model, inputs=inputs)


def _bundled(name: str) -> Any:
    from pipeplan_launch import load_job

    return load_job(name, 0)


MOE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 8000}
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "resnet50": (lambda: _bundled("resnet50"), 16),
    "vgg16": (lambda: _bundled("vgg16"), 16),
    "gnmt8": (lambda: _bundled("gnmt8"), 16),
    "gpt2": (lambda: _hugging_face("GPT2", 1024), 4),
    "gpt2, 48 blocks": (lambda: _hugging_face("GPT2", 1024, "meta", n_layer=48), 4),
    "bert-base": (lambda: _hugging_face("Bert", 512), 4),
    "t5-small": (lambda: _hugging_face("T5", 512), 4),
    "mixtral, 6 blocks": (lambda: _hugging_face("Mixtral", 128, num_attention_heads=8, **MOE), 4),
    "the same, experts whole": (
        lambda: _hugging_face("Mixtral", 128, num_attention_heads=8, experts_implementation="eager", **MOE),
        4,
    ),
    "llama-7b": (lambda: _hugging_face("Llama", 2048, "meta", vocab_size=32000), 4),
}
"""A job, and the samples in a minibatch."""


def measure(name: str) -> dict[str, Any]:
    """One run, in this process."""
    import torch

    from pipeplan_launch.tracing.subgraph import cut_subgraph
    from pipeplan_launch.tracing.trace import trace_job

    torch.set_num_threads(1)
    build, minibatch = MODELS[name]
    job = build()
    wall, cpu = time.perf_counter(), time.thread_time()
    traced = trace_job(job, minibatch)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    began = time.thread_time()
    for layer in traced.layers:
        received = [spec.name for spec in traced.tensors if layer.name in spec.consumers]
        cut_subgraph(
            traced, [layer.name], received, [spec.name for spec in traced.tensors if spec.producer == layer.name]
        )
    return {
        "parameters": sum(one.numel() for one in job.model.parameters()),
        "layers": len(traced.layers),
        "wall_s": wall,
        "cpu_s": cpu,
        "cut_s": time.thread_time() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "how": traced.how,
    }


def _whole(how: str) -> int:
    """How many modules were taken whole."""
    listed = how.partition("taken whole: ")[2].partition(";")[0]
    return len(listed.split(", ")) if listed else 0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {'; '.join(MODELS)}")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]!r}: write one of {'; '.join(MODELS)}")
    if given.child:
        print(json.dumps(measure(given.names[0])))
        return
    table = Table("model", "params", "layers", "trace s", "CPU s", "aim s", "cut s", "peak MiB", "whole", box=None)
    for name in given.names or MODELS:
        command = [sys.executable, __file__, "--child", name]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for _ in range(given.runs)
        ]
        middle = {key: statistics.median(run[key] for run in runs) for key in ("wall_s", "cpu_s", "cut_s")}
        first = runs[0]
        table.add_row(
            name,
            f"{first['parameters'] / 1e6:.1f} M",
            str(first["layers"]),
            f"{middle['wall_s']:.1f}",
            f"{middle['cpu_s']:.1f}",
            str(AIMS.get(name, "")),
            f"{middle['cut_s']:.2f}",
            f"{first['peak_bytes'] / 2**20:.0f}",
            str(_whole(first["how"]) or ""),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
