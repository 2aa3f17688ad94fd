"""The command line as a person meets it: answers on stdout, one line of complaint on stderr, exit code 2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals, refused
from decoders import decoder

from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile


def _save(path: Path = Path("profile.json"), saved: int = 6) -> None:
    Profile(
        layers=(Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 40, saved)),
        tensors=(Tensor("x", "a", ("b",), 8, 8), Tensor("y", "b", ("c",), 4, 4)),
        minibatch=4,
        model_name="small",
        model_ref="small.py:build",
    ).save(path)


QUICK = ("--solver", "dp")


def test_without_a_profile_there_is_an_example_and_nothing_is_written(run: Run) -> None:
    done = run("solve", "--cluster", "C", *QUICK)
    assert done.code == 0
    assert "vgg16 (bundled, as there is no profile.json here)" in done.err
    assert done.out.startswith("An example: there is no profile.json here, so this is VGG-16 on V100")
    assert done.err.splitlines()[-1].startswith("nothing was written: this is an example.")
    assert ("pipeplan solve vgg16-v100 --cluster C" in done.err, "NEXT" in done.out) == (True, False)
    document = json.loads(run("solve", "--cluster", "C", "--schedule", "1f1b-stashing", *QUICK, "--json").out)
    assert document["profile"]["path"] is None
    assert "there is no profile.json here to write a plan for" in refused(run, "solve", "--cluster", "C", "-o", "here")
    assert list(Path().iterdir()) == []


def test_a_bundled_profile_is_planned_for_by_its_name_and_one_in_this_folder_comes_first(run: Run) -> None:
    done = run("solve", "vgg16-v100", "--cluster", "B")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err, "no colours in a pipe"
    assert max(map(len, done.out.splitlines())) <= 80
    assert "vgg16 (bundled); modelled" in done.err
    assert not done.out.startswith("An example")
    assert "modelled on V100 SXM2 16 GB, not measured" in done.err
    for expected in ("\nRUN ", "stage 1", "of memory", "samples/s", "\nALSO ", "\nWHY ", "\nTRUST ", "\nNEXT "):
        assert expected in done.out
    assert "proven: no plan of the searched space is" in " ".join(done.out.split())
    assert Path("plan/launch.sh").exists()
    _save()
    done = run("solve", "--cluster", "A", "--servers", "1", "--json", "--no-write")
    assert "small (profile.json in this folder)" in done.err
    document = json.loads(done.out)
    assert (document["profile"]["model"], document["verdict"]["proven"]) == ("small", True)


def test_a_size_that_was_not_measured_is_planned_for_and_said(run: Run) -> None:
    _save()
    done = run("solve", "--cluster", "C", "--microbatch", "8", "--no-write", "--json", *QUICK)
    assert json.loads(done.out)["profile"]["minibatch"] == 8
    assert "rescaled linearly from microbatch 4 to 8" in done.err
    assert "rescaled" not in run("solve", "--cluster", "C", "--microbatch", "4", "--no-write", "--json", *QUICK).err


def test_inference_fixed_stages_and_more_levels_than_two(run: Run) -> None:
    _save()

    def solved(*arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(run("solve", *arguments, "--json", *QUICK).out)
        return document

    assert solved("--cluster", "C", "--inference", "-o", "p1")["plan"]["inference"] is True
    assert json.loads(Path("p1/stages/stage-0.json").read_text())["schedule"]["name"] == "forward-only"
    assert len(solved("--cluster", "C", "--stages", "2", "-o", "p2")["plan"]["stages"]) == 2
    levels = "".join(
        f'[[level]]\nname = "{name}"\ncount = 2\nbandwidth = "{rate} B/s"\n'
        for name, rate in (("board", 1e9), ("server", 1e8), ("rack", 1e7))
    )
    device = '[device]\nname = "d"\nkind = "cpu"\nmemory = "1 GiB"\n'
    Path("three.toml").write_text(f'format = "pipeplan-cluster"\nversion = 1\nname = "three"\n{device}{levels}')
    document = solved("--cluster", "three.toml", "--no-write")
    assert (document["verdict"]["proven"], len(document["cluster"]["levels"])) == (True, 3)


def test_a_plan_that_was_used_is_refused_before_any_work_and_others_are_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save()
    for stages in "21":
        assert run("solve", "--cluster", "C", "--stages", stages, *QUICK).code == 0
        assert len(list(Path("plan/stages").iterdir())) == int(stages)
    script, plan = Path("plan/launch.sh"), Path("plan/plan.json")
    for path, old, new in ((script, "OMP_NUM_THREADS", "OMP_THREADS"), (plan, '"small"', '"smaller"')):
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new, 1))
        assert "already holds a plan" in run("solve", "--cluster", "C").err
        path.write_text(before)
    Path("plan/runs/20260131T120000Z").mkdir(parents=True)
    assert run("solve", "--cluster", "C", "--force", *QUICK).code == 0

    def search(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr("pipeplan.planning.candidates.best_in_time", search)
    monkeypatch.setattr("pipeplan.cli.solve_and_write.solve", search)
    for asked in ("", "--batch 8", "--schedule 1f1b-stashing"):
        assert refused(run, "solve", "--cluster", "C", *asked.split()).startswith("plan already holds a plan")


REFUSED = {
    "solve --workers two": "'two' is not a valid integer",
    "solve --servers 3": "the cluster local is one server",
    "solve --cluster A --servers 0": "cannot have 0 servers: a cluster has at least one",
    "solve --time-limit 0": "--time-limit must be above 0",
    "solve --solver magic": "--solver: there is no 'magic'; there are: dp, ilp, both",
    "solve -o profile.json": "profile.json is not a folder",
    "import nowhere.txt --microbatch 4 -o x.json": "cannot read nowhere.txt",
}
"""Further mistakes than those of docs/errors.md."""
BEFORE_THE_FOLDER = {
    f"--microbatch {10**24}": "at most 10000000",
    "--schedule auto --batch 8": "there is no schedule 'auto'",
    "--batch 0": "--batch must be at least 1 sample, not 0",
    "--batch -4": "--batch must be at least 1 sample, not -4",
    "--schedule 1f1b-stashing --batch 8": "leave out --batch",
    "--inference --batch 8": "--batch is for training",
    "--inference --staleness 0": "--staleness chooses among schedules",
    "--batch 8 --stages 9": "9 stages asked for",
    "--microbatch auto": "'auto' is not a valid integer",
    "--for megatron": "Megatron",
    "--for nobody": "there is no export for 'nobody'",
}


def test_what_cannot_be_used_gets_one_line_and_writes_nothing(run: Run) -> None:
    _save()
    check_refusals(run, REFUSED)
    _occupy("plan")
    check_refusals(run, {f"solve --cluster C {line}": said for line, said in BEFORE_THE_FOLDER.items()})


def _occupy(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "plan.json").write_text("{}")


def test_nothing_fits_names_the_layer_and_what_is_missing(run: Run) -> None:
    said = "layer 'c' alone needs 64 GiB, 48.8 GiB more than the 15.2 GiB of one V100 16 GB"
    # Without a size the smallest one is named, a quarter of the profile's.
    for gibibytes, asked in ((64, ["--microbatch", "4"]), (256, [])):
        _save(saved=gibibytes << 30)
        assert said in refused(run, "solve", "--cluster", "A", "--servers", "1", *asked)


def test_what_a_profile_lacks_is_said_where_it_matters(run: Run) -> None:
    _save()
    whole = replace(Profile.load("profile.json"), provenance=Provenance("measured", "cpu"))
    solve = ("solve", "--cluster", "local", "--workers", "2", "--force", *QUICK)
    untrained = "the job has no loss and no data, so that it can be planned, but launch.sh cannot train it"
    unchecked = "not self-checked, whether stages train as the model alone does (--no-self-check)"
    for profile, more, said in (
        (whole, [], set()),
        (replace(whole, lacks=("loss", "data")), [], {untrained}),
        (replace(whole, lacks=("loss", "data")), ["--inference"], set()),
        (replace(whole, unchecked="--no-self-check"), [], {unchecked}),
    ):
        profile.save("profile.json")
        done = run(*solve, *more)
        assert done.code == 0
        assert {line for line in (untrained, unchecked) if line in done.err} == said
        assert ("launch.sh --epochs" in done.out) is (not profile.lacks and not more), (
            "a run that is possible is proposed"
        )


def test_layers_that_ties_keep_together_are_named(run: Run) -> None:
    decoder(2, tied=True).save(Path("profile.json"))
    given = ("solve", "--cluster", "A", "--servers", "1", *QUICK, "--no-write")
    done = run(*given)
    assert done.code == 0
    assert "'wte' and 'lm_head' have weights or memory in common and stay in one stage with the 7 layers" in done.err
    decoder(2).save(Path("profile.json"))
    assert "in common" not in run(*given).err
