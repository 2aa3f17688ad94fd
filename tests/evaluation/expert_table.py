"""What an expert user would ask: eight models on four clusters, at two global batches.

    python tests/evaluation/expert_table.py FOLDER [--only MODEL/CLUSTER/BATCH] [--limit 30] [--cpu] [--markdown]

FOLDER receives the profiles, which are made once, and the answer and plan.json of each row. `--only` takes a pattern,
such as `llama3_8b/*/2048`, and may be repeated. Every row is one `pipeplan solve` in a process of its own.
docs/evidence/expert.md has the table, and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pipeplan
from pipeplan.util.units import show_step_time

HERE = Path(__file__).parent / "expert"
MODELS = {
    "gpt2_xl": ("GPT-2 XL", (256, 2048)),
    "llama3_8b": ("Llama-3 8B", (256, 2048)),
    "qwen25_7b": ("Qwen2.5 7B", (256, 2048)),
    "bert_large": ("BERT-large", (256, 2048)),
    "t5_large": ("T5-large", (256, 2048)),
    "vit_large": ("ViT-L", (256, 2048)),
    "resnet152": ("ResNet-152", (512, 4096)),
    "unet": ("U-Net", (512, 4096)),
}
"""The function in expert/models.py, the model's name, and the global batches in samples."""
CLUSTERS = {
    "a100-4x8": ("4 x 8 A100 80 GB, 200 Gbit/s", "a100"),
    "a100-8x1": ("8 servers of one A100 80 GB, 10 Gbit/s", "a100"),
    "mixed": ("2 x 8 A100 80 GB and 2 x 4 V100 32 GB, 100 Gbit/s", "a100"),
    "rtx4090-2x8": ("2 x 8 RTX 4090 24 GB without peer-to-peer, 25 Gbit/s", "rtx-4090"),
}
"""The file in expert/clusters, what it is, and the device that its profiles are estimated for."""
SLOWER = "v100-float16"
"""The other device of the mixed cluster."""
UNIFORM = "uniform pipeline"
RIVALS = ("DDP", "ZeRO-1", "FSDP", "HSDP", UNIFORM)
COLUMNS = ["model", "batch", "answer", "microbatch", "samples/s", "gap", "CPU s", *RIVALS]
MOST_GAP = 0.05
"""The aim at the larger batch."""
LONGEST_PLAN, LONGEST_PROBLEM = 24, 60
"""Characters of a plan and of a reason why there is none."""
MOST_HALVINGS = 8
PATIENCE = 10
"""A row is given up after so many times its limit."""
CPU_CLOCK = "import time; time.perf_counter = time.monotonic = time.process_time; "
"""Makes deadlines count CPU seconds."""


@dataclass(frozen=True)
class Question:
    """One row of the table."""

    model: str
    cluster: str
    batch: int

    @property
    def name(self) -> str:
        """The name that `--only` matches."""
        return f"{self.model}/{self.cluster}/{self.batch}"


@dataclass(frozen=True)
class Row:
    """The answer to one question. Rates are in samples per second."""

    question: Question
    cpu_s: float
    problem: str = ""
    """Why there is no answer."""
    kind: str = ""
    plan: str = ""
    """Replicas of each stage."""
    schedule: str = ""
    microbatch: int = 0
    idle: int = 0
    """Workers without a stage."""
    rate: float = 0.0
    gap: float = 0.0
    cut_off: bool = False
    """Whether the time limit ended the search."""
    rivals: dict[str, float] = field(default_factory=dict)


def questions(patterns: Sequence[str]) -> list[Question]:
    """The rows whose names match one of the patterns, or all."""
    rows = [
        Question(model, cluster, batch)
        for cluster in CLUSTERS
        for model, (_, batches) in MODELS.items()
        for batch in batches
    ]
    return [row for row in rows if not patterns or any(fnmatch(row.name, pattern) for pattern in patterns)]


def profile_of(model: str, device: str, folder: Path) -> Path:
    """The profile of a model on a device, estimated if the folder does not have it."""
    path = folder / f"{model}-{device}.json"
    if not path.exists():
        own = HERE / "devices" / f"{device}.toml"
        profile = pipeplan.profile(
            f"{HERE / 'models.py'}:{model}", device=str(own) if own.exists() else device, halvings=MOST_HALVINGS
        )
        profile.save(path)
    return path


def cluster_of(question: Question, folder: Path) -> Path:
    """The cluster file; the V100 of the mixed cluster has the speed at which it runs this model."""
    path = HERE / "clusters" / f"{question.cluster}.toml"
    if question.cluster != "mixed":
        return path
    fast, slow = (
        sum(layer.forward_s + layer.backward_s for layer in pipeplan.read_profile(path).layers)
        for path in (profile_of(question.model, device, folder) for device in (CLUSTERS["mixed"][1], SLOWER))
    )
    written = folder / f"mixed-{question.model}.toml"
    written.write_text(path.read_text().replace("speed = 0.4", f"speed = {fast / slow:.3f}"))
    return written


def solved(question: Question, folder: Path, limit: float, cpu: bool) -> Row:
    """Solve one row in a process of its own, and keep its answer in the folder."""
    place = folder / "answers" / question.name.replace("/", "-")
    place.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place / "plan", ignore_errors=True)
    profile = profile_of(question.model, CLUSTERS[question.cluster][1], folder)
    command = f"{CPU_CLOCK if cpu else ''}from pipeplan.cli import main; main()"
    options = ["--cluster", str(cluster_of(question, folder)), "--batch", str(question.batch)]
    output = ["--time-limit", str(limit), "-o", str(place / "plan")]
    used = _cpu_s()
    with (place / "answer.txt").open("w") as out, (place / "errors.txt").open("w") as errors:
        arguments = [sys.executable, "-c", command, "solve", str(profile), *options, *output]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(arguments, stdout=out, stderr=errors, timeout=PATIENCE * limit, check=False)
    cpu_s = _cpu_s() - used
    lines = (place / "errors.txt").read_text().strip().splitlines()
    if (place / "plan" / "plan.json").exists():
        row = read_row(question, folder, json.loads((place / "plan" / "plan.json").read_text()), cpu_s)
    else:
        why = lines[-1] if lines else f"no answer in {PATIENCE * limit:.0f} s"
        row = Row(question, cpu_s, problem=why.removeprefix("error: "))
    return row


def _cpu_s() -> float:
    """CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_row(question: Question, folder: Path, document: dict[str, Any], cpu_s: float) -> Row:
    """The row of a plan.json."""
    plan, choice, cluster = document["plan"], document["choice"], pipeplan.cluster(cluster_of(question, folder))
    return Row(
        question,
        cpu_s,
        kind=choice["taken"],
        plan=plan["config"],
        schedule=plan["schedule"],
        microbatch=document["profile"]["minibatch"],
        idle=cluster.workers
        - len({worker for stage in plan["stages"] for worker in stage["workers"]}) * plan["copies"],
        rate=document["throughput"]["samples_per_s"],
        gap=document["gap"],
        cut_off=not choice["finished"],
        rivals={
            one["kind"]: one["samples_per_s"]
            for one in choice["rivals"]
            if one["kind"] != UNIFORM or "-" in one["config"]  # one stage is no pipeline
        },
    )


def answer_of(row: Row) -> str:
    """The plan in a few words."""
    if row.problem:
        return textwrap.shorten(row.problem, LONGEST_PROBLEM, placeholder=" …")
    idle = f", {row.idle} idle" if row.idle else ""
    if "-" not in row.plan:
        kind = row.kind if row.kind in RIVALS and row.kind != UNIFORM else RIVALS[0]
        return f"{kind} on {row.plan}{idle}"
    config = row.plan if len(row.plan) <= LONGEST_PLAN else f"{row.plan.count('-') + 1} stages"
    return f"{config}, {row.schedule}{idle}"


def cells(row: Row) -> list[str]:
    """The columns of a row."""
    name, _ = MODELS[row.question.model]
    seconds = f"{row.cpu_s:.0f}{'+' if row.cut_off else ''}"
    figures = ["", "", ""] if row.problem else [str(row.microbatch), show_step_time(row.rate), f"{row.gap:.1%}"]
    rivals = [show_step_time(row.rivals[kind]) if kind in row.rivals else "-" for kind in RIVALS]
    return [name, f"{row.question.batch:,}", answer_of(row), *figures, seconds, *rivals]


def print_rows(rows: Sequence[Row], markdown: bool) -> None:
    """Print a table for each cluster, and how many rows keep the aims."""
    for cluster, (title, _) in CLUSTERS.items():
        table = [cells(row) for row in rows if row.question.cluster == cluster]
        if not table:
            continue
        print(f"\n{'## ' * markdown}{title}\n")
        lines = [COLUMNS, *table]
        widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
        if markdown:
            print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
        for line in table if markdown else lines:
            padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            print("| " + " | ".join(line) + " |" if markdown else "  ".join(padded).rstrip())
    large = [row for row in rows if row.question.batch == MODELS[row.question.model][1][1]]
    close = sum(not row.problem and row.gap <= MOST_GAP for row in large)
    print(f"\nAt the larger batch {close} of {len(large)} rows have a gap of at most {MOST_GAP:.0%}.")


def main() -> None:
    """Solve the rows that are asked for, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="keeps profiles and answers")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL/CLUSTER/BATCH", help="these rows")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each row")
    parser.add_argument("--cpu", action="store_true", help="limit CPU seconds, on a machine that has other work")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    given = parser.parse_args()
    asked = questions(given.only)
    if not asked:
        parser.error(
            f"no row is called {' or '.join(given.only)}; models: {', '.join(MODELS)}; clusters: {', '.join(CLUSTERS)}"
        )
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for one in asked:
        rows.append(solved(one, given.folder, given.limit, given.cpu))
        print(f"{one.name}: {answer_of(rows[-1])}, {rows[-1].cpu_s:.0f} CPU s", file=sys.stderr, flush=True)
    print_rows(rows, given.markdown)


if __name__ == "__main__":
    main()
