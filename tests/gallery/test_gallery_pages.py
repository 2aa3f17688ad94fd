"""Every job of the gallery has its section, and the comparison of transcripts finds what is wrong."""

from __future__ import annotations

from shown import GALLERY, missing, sections, shape, transcripts

NAMES = {"mnist", "resnet50", "gpt", "lstm"}


def test_every_job_has_a_section() -> None:
    assert {file.stem for file in GALLERY.glob("*.py")} == {*NAMES, "lora"}
    assert set(sections()) == NAMES, "lora has a page of its own"


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
    for section in sections().values():
        assert [*transcripts(section)]
        for command, shown in transcripts(section):
            assert any(line != "…" and shape(line) for line in shown), command
