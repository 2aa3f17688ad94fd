"""Measures what messages and all-reduces between workers take, the way that the executor sends them.

    meeting     who is there: every process says where it runs; a rank that does not come is named
    turns       which pairs and groups are measured at the same time
    traffic     one message, one all-reduce, and their times over sizes
    survey      all pairs first, then every level that was found
    parting     when a worker is lost meanwhile: which
    here        all of it on this machine, without a launcher

Finding levels in what pairs reach is the caller's: `measure` asks a function for them.
"""

from __future__ import annotations

from pipeplan_launch.linkprobe.here import measure_here
from pipeplan_launch.linkprobe.joined import measure_joined
from pipeplan_launch.linkprobe.settings import Found, Measured, Settings, Timed

__all__ = ["Found", "Measured", "Settings", "Timed", "measure_here", "measure_joined"]
