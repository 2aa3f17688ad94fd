"""`pipeplan docs`: the pages that come with the package."""

from __future__ import annotations

from commandline import Run, refused
from repository import ROOT


def test_all_pages_are_listed_with_their_titles(run: Run) -> None:
    done = run("docs")
    assert done.code == 0
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines()}
    assert set(listed) == {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")
    }
    assert listed["proof"] == "The proof and the bound"
    assert (listed["reference/cli"], listed["reference/api"]) == ("Command line", "Python API")
    assert run("docs", "reference/cli").out.startswith("# Command line\n")
    assert str(ROOT / "docs") in done.err


def test_a_page_is_printed_as_it_is(run: Run) -> None:
    text = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    for name in ("servers", "docs/servers.md"):
        assert run("docs", name).out == text


def test_an_unknown_page_is_one_line(run: Run) -> None:
    assert refused(run, "docs", "comparson").startswith("there is no page 'comparson'; did you mean 'comparison'")
    refused(run, "docs", "../README")
