"""Options that contradict each other are refused where they are made."""

from __future__ import annotations

import pytest

from pipeplan.errors import InputError
from pipeplan.problem.problem import Options


def test_a_number_of_stages_must_be_within_their_maximum() -> None:
    assert Options(stages=2, max_stages=2).stages == 2
    with pytest.raises(InputError, match="3 stages asked for, and at most 2"):
        Options(stages=3, max_stages=2)
