"""What launch.sh makes of workers that failed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeplan_launch.torchrun import _report


@dataclass
class Failure:
    exitcode: int
    timestamp: int = 0


@dataclass
class Error:
    failures: dict[int, Failure]


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ({0: 2, 1: 2}, 2, ""),
        ({0: 130, 2: 2}, 2, ""),
        ({0: 130, 2: -9}, 1, "error: worker 2 was ended by SIGKILL (out of memory is the usual reason for SIGKILL)\n"),
        ({0: 2, 2: -11}, 2, "error: worker 2 was ended by SIGSEGV\n"),
        ({0: -15, 1: -15, 2: 1}, 1, "error: worker 2 ended with status 1\n"),
        ({0: -15, 1: 2}, 2, ""),
        ({1: -15}, 1, "error: worker 1 was ended by SIGTERM\n"),
        ({1: 1}, 1, "error: worker 1 ended with status 1\n"),
    ],
)
def test_only_the_workers_at_fault_are_named(
    statuses: dict[int, int], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Error({rank: Failure(code) for rank, code in statuses.items()})
    assert _report(error) == status  # type: ignore[arg-type]
    assert capsys.readouterr().err == said


def test_the_first_to_fail_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = Error({0: Failure(-6, timestamp=11), 1: Failure(-15, timestamp=9), 2: Failure(-9, timestamp=10)})
    assert _report(error) == 1  # type: ignore[arg-type]
    assert "worker 2 was ended by SIGKILL" in capsys.readouterr().err
