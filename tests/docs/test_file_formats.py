"""The examples in docs/file-formats.md load with the real parsers; the page describes every field that is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.api import read_profile
from pipeplan.cluster_data import cluster_toml as clusters
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder, plan_json
from pipeplan_launch.job_reference import JobFile
from pipeplan_launch.plan.launch_plan import LaunchPlan, Prediction, StagePlacement
from pipeplan_launch.plan.stage_files import load_plan

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "file-formats.md"
PROJECT = Path("/home/me")
PLAN = PROJECT / "plan"

# Names of dataclass fields that a file writes under another name.
WRITTEN_AS = {
    "model_ref": "ref",
    "model_name": "name",
    "model_file": "file",
    "optimizer_name": "name",
    "optimizer_state_ratio": "state_bytes_per_parameter_byte",
    "optimizer_elementwise": "elementwise",
    "whole_forward_s": "whole",
    "whole_backward_s": "whole",
    "whole_split_s": "whole",
    "memory_bytes": "memory",
    "latency_s": "latency",
    "levels": "level",
    "predictions": "prediction",
    "machines": "server",
    "server_price": "price_per_hour",
    "inside": "devices",
}


def example(title: str) -> str:
    """The one block of TOML in the section with this title."""
    sections = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next(text for text in sections if text.startswith(title))
    blocks = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1, f"section {title!r} has {len(blocks)} blocks of TOML"
    return str(blocks[0])


@pytest.fixture
def profile() -> Profile:
    """A bundled profile, as if `pipeplan profile translate.py:build` had written it into the project."""
    job = JobFile(f"{PROJECT}/translate.py", "sha256:5f0b")
    loaded = replace(read_profile("mnist-v100"), model_ref=f"{PROJECT}/translate.py:build", model_file=job)
    return replace(loaded, file=str(PROJECT / "profile.json"))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "lab.toml"
    path.write_text(example("Cluster files"), encoding="utf-8")
    return clusters.read_cluster(path)


@pytest.fixture
def outcome(profile: Profile, cluster: Cluster) -> Outcome:
    """What solving a profile on the example cluster gives."""
    return solve(Problem(profile, cluster, Options()))


def test_the_cluster_says_everything_a_cluster_can(cluster: Cluster) -> None:
    text = example("Cluster files")
    assert cluster.workers == 4
    assert cluster.servers == 2
    for kind in (Device, Level):
        # GPUs share no cores: the table of fields describes them.
        for field in (one for one in fields(kind) if one.name != "cores"):
            assert re.search(rf"^{WRITTEN_AS.get(field.name, field.name)} = ", text, re.MULTILINE), field.name


def test_the_servers_that_differ_are_read_and_say_everything(tmp_path: Path) -> None:
    text = example("Servers that differ")
    path = tmp_path / "mixed.toml"
    path.write_text(text, encoding="utf-8")
    mixed = clusters.read_cluster(path)
    assert (mixed.uniform, mixed.server_sizes, mixed.price_per_hour) == (False, (4, 4, 2), 25.98)
    assert mixed.speed_of(range(mixed.workers)) == 0.4
    names = {"count", *(WRITTEN_AS.get(field.name, field.name) for kind in (Level, Server) for field in fields(kind))}
    for name in names:
        assert re.search(rf"^{name} = ", text, re.MULTILINE), name


def test_the_executor_loads_the_stage_file(outcome: Outcome, tmp_path: Path) -> None:
    for index, document in enumerate(plan_json.stage_documents(outcome, PLAN)):
        plan_folder.write_json(tmp_path / "stages" / f"stage-{index}.json", document)
    plan = load_plan(tmp_path)
    assert plan.model_ref == f"{tmp_path.parent}/translate.py:build"
    assert plan.model_file is not None
    assert plan.model_file.path == "/home/me/translate.py"
    assert [stage.workers for stage in plan.pipeline] == [stage.workers for stage in outcome.plan.stages]


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        ("profile.json", (Profile, Layer, Tensor, Provenance)),
        ("Cluster files", (Cluster, Device, Level)),
        ("Servers that differ", (Server,)),
        ("plan.json", (Plan, Stage)),
        ("stages/stage-N.json", (LaunchPlan, StagePlacement, Prediction)),
    ],
)
def test_every_field_of_the_dataclasses_is_described(title: str, kinds: tuple[type[Any], ...]) -> None:
    text = described(title)
    for kind in kinds:
        for field in fields(kind):
            if field.name == "exchange_rings":
                continue  # of `Cluster`: no file has it
            name = WRITTEN_AS.get(field.name, field.name)
            assert f"`{name}`" in text or f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"


def test_every_field_of_the_documents_is_described(profile: Profile, outcome: Outcome, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    documents = {
        "profile.json": json.loads((tmp_path / "profile.json").read_text(encoding="utf-8")),
        "plan.json": json.loads(json.dumps(plan_json.plan_document(outcome, PLAN))),
        "stages/stage-N.json": plan_json.stage_documents(outcome, PLAN)[0],
    }
    for title, document in documents.items():
        text = described(title)
        for name in {part for path in paths(document) for part in path if isinstance(part, str)}:
            assert f"`{name}`" in text, f"{title}: {name}"


def described(title: str) -> str:
    """The section's tables and sentences, without its example."""
    text = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"```.*?```", "", next(part for part in text if part.startswith(title)), flags=re.DOTALL)


def paths(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of every value in a document, those in timings aside."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            if key != "seconds":
                yield from paths(inner, (*above, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*above, index))
