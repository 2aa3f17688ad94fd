"""Calling what the user wrote: whatever it raises becomes one line that quotes the place in their file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.loading import describe


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """`what` names the part of the job that runs inside, as in "the job's loss"."""
    try:
        yield
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:  # a job that ends its process would look like a fault
        raise LaunchError(f"{what} failed: {describe(error)}") from error
