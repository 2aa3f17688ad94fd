"""`pipeplan reproduce table1` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeplan.cli import cli
from pipeplan.errors import InputError
from pipeplan.reproduce import inference
from pipeplan.reproduce.published import ROWS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["reproduce", *arguments], env={"PIPEPLAN_REFERENCE": ""})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "say which result: table1"),
        (("table2",), "there is no result 'table2': there is table1"),
        (("table1", "--rows", "vgg"), "--rows: there is no row 'vgg'"),
        (("table1", "-o", "a.html"), "a.html ends neither in .md nor in .json"),
        (("table1", "--keep", "there"), "--keep goes with --replay"),
        (("table1", "--replay-seconds", "5"), "--replay-seconds goes with --replay"),
        (("table1", "--time-limit", "0"), "--time-limit must be above 0 seconds"),
        (("table1", "--reference", "nowhere"), "nowhere has no pipedream/vgg16.txt"),
    ],
    ids=["none", "wrong", "row", "file", "keep", "seconds", "limit", "reference"],
)
def test_what_is_wrong_is_said_in_a_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), result.output
    assert complaint in str(result.exception)


@pytest.mark.slow
def test_a_row_without_a_pipeline_needs_no_experiment(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    result = run("table1", "--rows", "gnmt8-2x8", "--solver", "dp", "--json", "-o", str(file))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (row,) = document["rows"]
    assert (row["paper"]["gain"], row["paper"]["config"]) == (1, "16")
    assert row["ours"]["minibatch_s"] <= row["data_parallelism"]["minibatch_s"]
    assert row["rank"]["among"] == 2**16 - 1 + 2**8 - 1
    assert document["experiments"] == document["reasons"] == document["replays"] == []
    assert {one["how"] for one in document["efficiencies"]} == {"fitted", "stated"}
    text = file.read_text(encoding="utf-8")
    assert "| gnmt8-2x8 | B | 16 | 1.00 | 1.00 | +0% |" in text
    assert "| pipelined, cyclic |" in text


def test_nothing_that_predicts_needs_torch() -> None:
    code = "import sys, pipeplan.cli.reproduce; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_whole_table_without_published_profiles() -> None:
    result = run("table1", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["name"] for row in document["rows"]] == [row.name for row in ROWS]
    assert all(row["profile"].startswith("estimated") for row in document["rows"])
    reasons = {reason["name"] for reason in document["reasons"]}
    assert reasons == {row["name"] for row in document["rows"] if row["paper"]["off"]}
    assert len(document["inference"]["ways"]) == len(inference.predict())


@pytest.mark.slow
def test_the_whole_table_on_published_profiles(reference: Path) -> None:
    """What docs/table1.md says of it: which rows are within the limit, and what explains those that are not."""
    result = run("table1", "--json", "--reference", str(reference))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    off = {row["name"] for row in document["rows"] if row["paper"]["off"]}
    open_ones = {reason["name"] for reason in document["reasons"] if not reason["explained"]}
    assert open_ones == {"awd-lm-1x4", "s2vt-4x1"}
    assert off - open_ones == {"alexnet-2x8", "gnmt16-1x4", "gnmt8-1x4", "gnmt16-4x4", "gnmt8-3x4"}
    for row in document["rows"]:
        assert row["ours"]["minibatch_s"] <= row["paper"]["minibatch_s"] * (1 + 1e-9)
        assert row["rank"]["place"] <= row["rank"]["among"]
