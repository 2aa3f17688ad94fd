"""`pipeplan report` and `pipeplan export` as a person meets them, and rates and prices in the report."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals, refused
from reported import branching, small_cluster, write_run

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import write_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Provenance, SampleFlops, SampleWork
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder
from pipeplan.report.source import ReportSource, read_report_source


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, a cluster, and the plan for them."""
    folder = tmp_path_factory.mktemp("solved")
    profile, cluster = branching(), small_cluster()
    profile.save(folder / "profile.json")
    write_cluster(cluster, folder / "tiny.toml")
    outcome = solve(Problem(profile, cluster, Options()), Settings(solver="dp", certify=False))
    plan_folder.write_plan(outcome, folder / "plan")
    return folder


@pytest.fixture
def planned(run: Run, solved: Path) -> Path:
    """A copy of it, here."""
    shutil.copytree(solved, Path(), dirs_exist_ok=True)
    return Path("plan")


def _source(plan: Path) -> ReportSource:
    return read_report_source(plan_file.read_plan_document(plan), branching())


def test_the_latest_run_is_put_beside_it_unless_another_is_named(run: Run, planned: Path) -> None:
    for name in ("20260131T120000Z", "20260201T120000Z"):
        write_run(planned / "runs" / name, _source(planned))
    done = run("report", "--json")
    assert json.loads(done.out)["measured"]["run"] == "20260201T120000Z"
    assert done.err == "run: plan/runs/20260201T120000Z, the latest\n"
    told = json.loads(run("report", "plan", "plan/runs/20260131T120000Z", "--json").out)
    assert told["measured"]["run"] == "20260131T120000Z"
    assert told["timeline"]["measured"] is not None
    summary = planned / "runs" / "20260201T120000Z" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"plan": "sha256:0"}))
    done = run("report", "--json")
    assert json.loads(done.out)["measured"] is None
    assert done.err.startswith("without a run: plan/runs/20260201T120000Z is a run of another plan than plan has now")


def test_one_file_with_all_inside_goes_where_it_is_told_and_replaces_a_report(run: Run, planned: Path) -> None:
    done = run("report")
    assert (done.code, done.out, done.err) == (0, "", "written: plan/report.html\n")
    page = (planned / "report.html").read_text(encoding="utf-8")
    before = sorted(Path().rglob("*"))
    document = json.loads(run("report", "plan/plan.json", "--json").out)
    assert (document["format"], document["version"]) == ("pipeplan-report", 1)
    assert sorted(Path().rglob("*")) == before, "the document is only printed"
    inside = re.search(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1]) == document
    assert f"<title>{document['title']}" in page
    assert document["graph"] is not None
    for _ in range(2):
        assert run("report", "-o", "new/some.html").code == 0
        assert Path("new/some.html").read_text() == page, "the same plan gives the same file"


REFUSED = {
    "nowhere": "nowhere has no plan.json",
    "plan nowhere": "nowhere does not exist",
    "plan empty": "empty has no summary.json",
    "plan other-run": "is a run of another plan",
    "plan --profile nowhere.json": "cannot read nowhere.json",
    "plan --profile other.json": "their digests differ",
    "plan -o empty": "is a folder: name the file to write with -o",
    "plan -o profile.json/report.html": "cannot write profile.json/report.html",
    "plan -o notes.html": "notes.html exists and is not a report",
    "odd": "one for each stage, found 0",
}


def test_what_cannot_be_used_gets_one_line_and_writes_nothing(run: Run, planned: Path) -> None:
    for name in ("empty", "odd"):
        Path(name).mkdir()
    Path("notes.html").write_text("<html>mine</html>")
    branching(5).save(Path("other.json"))
    root = json.loads((planned / "plan.json").read_text())
    Path("odd/plan.json").write_text(json.dumps(root | {"prediction": root["prediction"] | {"stages": []}}))
    write_run(Path("other-run"), _source(planned))
    summary = json.loads(Path("other-run/summary.json").read_text())
    Path("other-run/summary.json").write_text(json.dumps(summary | {"plan": "sha256:0"}))
    check_refusals(run, {f"report {line}": said for line, said in REFUSED.items()})
    Path("profile.json").rename("moved.json")
    check_refusals(run, {"report": "name it with --profile"})


def test_solve_names_the_next_step(run: Run, planned: Path) -> None:
    """For this machine, the command that runs the plan; for others its explanation."""
    replace(branching(), model_ref="job.py:build").save(Path("measured.json"))
    solved = run("solve", "measured.json", "--cluster", "local", "--workers", "2", "--solver", "dp", "-o", "c d")
    next_line = " ".join(solved.out[solved.out.index("NEXT ") :].split())
    assert next_line == "NEXT 'c d/launch.sh' --epochs 1 | pipeplan explain 'c d'"
    words = ("solve", "--cluster", "tiny.toml", "--solver", "dp", "-o", "a b")
    assert run(*words).out.splitlines()[-1] == "NEXT  pipeplan explain 'a b'"
    assert not Path("a b/report.html").exists()
    assert run("report", "a b").code == 0
    last = run(*words, "--force").err.splitlines()[-1]
    assert last == "files of the older plan, to be written again: report.html in a b"


DP = pipeplan.Settings(solver="dp", certify=False)


@pytest.fixture
def files(run: Run) -> Run:
    work = SampleWork((SampleFlops("matmul", "float32", 1e9, 2e9),), dataset_size=1000)
    origin = Provenance("modelled", "cuda", "V100 SXM2 16 GB")
    Profile((Layer("a", 0.02, 0.02, 0, 0),), (), 10, "a.py:a", "a", provenance=origin, work=work).save("profile.json")
    levels = (Level("server", 2, 10e9),)
    write_cluster(
        Cluster("paid", Device("V100 16 GB", "cuda", 16 * 2**30), levels, server_price=7.2), Path("paid.toml")
    )
    return run


def test_rates_prices_and_hours_are_in_the_plan_and_the_report(files: Run) -> None:
    profile, cluster = pipeplan.read_profile("profile.json"), pipeplan.cluster("paid.toml")
    pipeplan.render(pipeplan.solve(profile, cluster, settings=DP, epochs=9, tokens_per_sample=64))
    plan = json.loads(Path("plan/plan.json").read_text())["throughput"]
    assert (plan["samples_per_s"], plan["run_s"], plan["run_price"]) == pytest.approx((500, 18, 0.036))
    report = json.loads(files("report", "plan", "--json").out)
    assert report["prediction"]["in_units"] == [
        "32000 tokens/s, 4.8% of the peak of V100 SXM2 16 GB (MFU), price per million samples 4.00",
        "an epoch of 1000 samples takes 2 s, price 0.004; 9 epochs take 18 s, price 0.036",
    ]
    done = files("solve", "--cluster", "paid.toml", "--solver", "dp", "--force")
    assert (done.code, " 500 samples/s" in done.out) == (0, True)
    plan = json.loads(Path("plan/plan.json").read_text())["throughput"]
    assert (plan["samples_per_s"], plan["price_per_million_samples"]) == pytest.approx((500, 4))
    assert plan["run_s"] is None
    for options, said in ODD:
        with pytest.raises(pipeplan.InputError, match=f"^.*{said}.*$"):
            pipeplan.solve(profile, cluster, settings=DP, **options)


ODD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"epochs": 0}, "epochs must be at least 1"),
    ({"dataset_size": -3}, "dataset-size must be at least 1"),
    ({"tokens_per_sample": 0}, "tokens-per-sample must be at least 1"),
    ({"epochs": 2, "inference": True}, "epochs is for training"),
)
SOLVE = (*("solve", "mnist-v100", "--cluster", "local", "--workers", "2"), "--solver", "dp", "--stages")
FLUSH = ("2", "--schedule", "1f1b-flush", "--batch", "128")
FILES = {"pipeline.py", "schedule.csv"}


def test_the_files_are_written_beside_the_plan_once_and_listed(run: Run) -> None:
    assert run(*SOLVE, *FLUSH).code == 0
    done = run("export", "torch-pipelining")
    assert done.code == 0
    lines = done.err.splitlines()
    assert {line.split()[1] for line in lines[:-1]} == {f"plan/torch-pipelining/{name}" for name in FILES}
    assert all(line.startswith("written: ") and len(line.split(maxsplit=2)) == 3 for line in lines[:-1])
    assert lines[-1].startswith("next: import plan/torch-pipelining/pipeline.py in your training script")
    assert {path.name for path in Path("plan/torch-pipelining").iterdir()} == FILES

    line = refused(run, "export", "torch-pipelining")
    assert line == "plan/torch-pipelining/pipeline.py exists: give another folder with -o, or --force to replace it"
    Path("plan/torch-pipelining/schedule.csv").write_text("mine")
    Path("plan/torch-pipelining/notes").write_text("kept")
    assert run("export", "torch-pipelining", "plan", "--force").code == 0
    assert Path("plan/torch-pipelining/schedule.csv").read_text() != "mine"
    assert Path("plan/torch-pipelining/notes").read_text() == "kept"


def test_a_plan_that_the_trainer_cannot_express_is_refused_and_mistakes_end_in_one_line(run: Run) -> None:
    assert run(*SOLVE, "2", "--schedule", "1f1b-stashing").code == 0
    assert refused(run, "export", "torch-pipelining") == (
        "torch.distributed.pipelining of torch 2.13.0 cannot express the plan 1-1: its schedule 1f1b-stashing "
        "is asynchronous, and keeps versions of the weights; `pipeplan solve … --for torch-pipelining --batch SAMPLES` "
        "finds the best plan that it can"
    )
    said = {"torch-piplining": "there is no target 'torch-piplining'; did you mean 'torch-pipelining'"}
    said |= {"": "say what to export the plan for: local, ssh, slurm", "torchtitan nowhere": "nowhere has no plan.json"}
    check_refusals(run, {f"export {line}": text for line, text in said.items()})
