"""All checks, in the order in which a new user needs what they check."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeplan.doctor import machine
from pipeplan.doctor.executor import plan_finding, torch_findings
from pipeplan.doctor.finding import OK, WARNING, Finding
from pipeplan.emulate.machine import lacking


def examine(plan: Path | None = None) -> list[Finding]:
    """Check this machine, and whether it can run its part of a plan.

    Takes some seconds, because another process imports torch.
    """
    with ThreadPoolExecutor() as executor:
        torch = executor.submit(torch_findings)
        networks = executor.submit(emulation)
        part = None if plan is None else executor.submit(plan_finding, plan)
        own = [
            machine.python(),
            machine.devices(),
            machine.folder(Path.cwd()),
            machine.temporary(),
            machine.shared_memory(),
            machine.ports(os.environ),
            machine.threads(os.environ),
        ]
        return [*own[:2], *torch.result(), *own[2:], networks.result(), *([] if part is None else [part.result()])]


def emulation() -> Finding:
    """Whether servers can be emulated on this machine."""
    need = "pipeplan replay"
    found, _, todo = lacking(processes=True).rpartition("; ")
    if todo:
        return Finding("emulation", WARNING, found, need, todo)
    return Finding("emulation", OK, "namespaces, ip and tc work: servers can be emulated", need)
