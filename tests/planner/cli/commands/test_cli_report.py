"""`pipeplan report` as a person meets it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals
from reported import branching, small_cluster, write_run

from pipeplan.cluster_data.cluster_toml import write_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
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


class _Page(HTMLParser):
    """The document of a page, and all that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.document: Any = None
        self.title = ""
        self.fetched: list[str] = []
        self._at: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._at = tag, dict(attrs)
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith(("#", "data:")):
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        tag, attributes = self._at
        if tag == "script" and attributes.get("type") == "application/json":
            self.document = json.loads(data)
        if tag == "title":
            self.title += data
        self._at = "", {}


def test_one_file_with_all_inside(run: Run, planned: Path) -> None:
    done = run("report")
    assert (done.code, done.out) == (0, "")
    assert done.err == "written: plan/report.html\n"
    page = _Page((planned / "report.html").read_text(encoding="utf-8"))
    assert page.fetched == []
    before = sorted(Path().rglob("*"))
    document = json.loads(run("report", "plan/plan.json", "--json").out)
    assert (document["format"], document["version"]) == ("pipeplan-report", 1)
    assert sorted(Path().rglob("*")) == before, "the document is only printed"
    assert page.document == document
    assert page.document["title"] in page.title
    assert page.document["graph"] is not None


def test_it_goes_where_it_is_told_and_replaces_a_report(run: Run, planned: Path) -> None:
    assert run("report", "-o", "new/some.html").code == 0
    before = Path("new/some.html").read_text()
    assert run("report", "-o", "new/some.html").code == 0
    assert Path("new/some.html").read_text() == before, "the same plan gives the same file"


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


REFUSED = {
    "nowhere": "nowhere has no plan.json",
    "empty": "empty has no plan.json",
    "plan nowhere": "nowhere does not exist",
    "plan empty": "empty has no summary.json",
    "plan other-run": "is a run of another plan",
    "plan --profile nowhere.json": "cannot read nowhere.json",
    "plan --profile other.json": "their digests differ",
    "plan -o empty": "is a folder: name the file to write with -o",
    "plan -o profile.json/report.html": "cannot write profile.json/report.html",
    "plan -o notes.html": "notes.html exists and is not a report",
    "truncated": "is not valid JSON",
    "newer": "this pipeplan reads up to 1",
    "odd": "one for each stage, found 0",
}


def test_what_cannot_be_used_gets_one_line_and_writes_nothing(run: Run, planned: Path) -> None:
    Path("empty").mkdir()
    Path("notes.html").write_text("<html>mine</html>")
    branching(5).save(Path("other.json"))
    text = (planned / "plan.json").read_text()
    root = json.loads(text)
    damaged = {"truncated": text[:-100], "newer": json.dumps(root | {"version": 99})}
    fewer = {"prediction": root["prediction"] | {"stages": []}}
    for name, content in (damaged | {"odd": json.dumps(root | fewer)}).items():
        Path(name).mkdir()
        (Path(name) / "plan.json").write_text(content)
    write_run(Path("other-run"), _source(planned))
    summary = json.loads(Path("other-run/summary.json").read_text())
    Path("other-run/summary.json").write_text(json.dumps(summary | {"plan": "sha256:0"}))
    check_refusals(run, {f"report {line}": said for line, said in REFUSED.items()})
    Path("profile.json").rename("moved.json")
    check_refusals(run, {"report": "name it with --profile"})


def test_a_plan_for_this_machine_names_the_command_that_runs_it(run: Run, planned: Path) -> None:
    profile = branching()
    measured = replace(profile, model_ref="job.py:build")
    measured.save(Path("measured.json"))
    where = ("--cluster", "local", "--workers", "2", "--solver", "dp", "-o", "a b")
    solved = run("solve", "measured.json", *where)
    assert solved.code == 0, solved.err
    next_line = " ".join(solved.out[solved.out.index("NEXT ") :].split())
    assert next_line == "NEXT 'a b/launch.sh' --epochs 1 | pipeplan explain 'a b'"


def test_solve_names_the_next_step(run: Run, planned: Path) -> None:
    words = ("solve", "--cluster", "tiny.toml", "--solver", "dp", "-o", "a b")
    assert run(*words).out.splitlines()[-1] == "NEXT  pipeplan explain 'a b'"
    assert not Path("a b/report.html").exists()
    assert run("report", "a b").code == 0
    assert (
        run(*words, "--force").err.splitlines()[-1]
        == "files of the older plan, to be written again: report.html in a b"
    )
