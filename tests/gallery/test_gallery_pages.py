"""The pages of the gallery belong together, and the comparison of their transcripts finds what is wrong."""

from __future__ import annotations

from repository import ROOT
from shown import BLOCK, missing, shape, transcripts

GALLERY = ROOT / "docs" / "gallery"
NAMES = {"mnist", "resnet50", "gpt", "lstm"}


def test_every_job_has_a_page_and_every_page_is_listed() -> None:
    index = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert {file.stem for file in GALLERY.glob("*.py")} == NAMES
    assert {file.stem for file in GALLERY.glob("*.md")} == NAMES | {"index"}
    for name in sorted(NAMES):
        assert f"]({name}.md)" in index
        assert f"]({name}.py)" in (GALLERY / f"{name}.md").read_text(encoding="utf-8")


def test_what_a_page_shows_wrong_is_found() -> None:
    row = "conv1   Conv2d   0.250   0.184   8   4.3   0.035   1.32   0.00  0.00  1.32"
    assert missing([row.replace("0.250", "9.999")], row, exact=False) is None
    assert missing([row.replace("1.32   0.00", "1.33   0.00")], row, exact=False)
    assert missing([row.replace("0.250", "9.999")], row, exact=True)
    assert missing(["b", "a"], "a\nb\n", exact=True) == "a"
    assert missing(["a", "…", "c"], "a\nb\nc\n", exact=True) is None
    assert shape("epoch 1/4  loss 1.2  test accuracy 9.81% (40 of 512)") == shape(
        "epoch 2/4  loss 0.3  test accuracy 90.00% (461 of 512)"
    )
    assert missing(["test loss 1.2"], "test accuracy 1.2", exact=False)


def test_transcripts_compare_something() -> None:
    for name in sorted(NAMES):
        page = GALLERY / f"{name}.md"
        assert BLOCK.search(page.read_text(encoding="utf-8"))
        for command, shown in transcripts(page):
            assert any(line != "…" and shape(line) for line in shown), command
