"""The transcripts in the documentation are what the commands print; `python tests/docs/test_transcripts.py` writes them
anew.
"""

from __future__ import annotations

import pytest
from transcripts import BLOCK, DOCS, PAGES, printed, transcripts

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.sweeps.points import SweepPoint
from pipeplan.sweeps.rows import SweepRow, row_records
from pipeplan.sweeps.sweep import PointAnswer

SECONDS = ("pipeplan explain", "pipeplan sweep")
"""Take seconds: run with the other commands of the documents. What is in them has tests of its own."""


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        pytest.param(
            page,
            *found,
            marks=pytest.mark.site if found[0].startswith(SECONDS) else (),
        )
        for page in PAGES
        for found in transcripts(page)
    ],
)
def test_the_page_shows_what_the_command_prints(page: str, command: str, shown: str) -> None:
    assert printed(command) == shown


def test_every_column_of_a_sweep_is_described(row_of_a_sweep: dict[str, object]) -> None:
    text = (DOCS / "choice.md").read_text(encoding="utf-8")
    for name in row_of_a_sweep:
        assert f"`{name}`" in text or name.startswith("bandwidth_"), name


@pytest.fixture
def row_of_a_sweep() -> dict[str, object]:
    cluster = Cluster("c", Device("d", "cpu", 1), (Level("server", 1, 0.0),))
    point = SweepPoint(Profile((Layer("a", 1.0, 1.0, 0, 0),), (), 1), cluster)
    return row_records([SweepRow(point, PointAnswer())])[0]


def main() -> None:
    """Write every transcript anew."""
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        renewed = BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{printed(found[1])}```", text)
        (DOCS / page).write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    main()
