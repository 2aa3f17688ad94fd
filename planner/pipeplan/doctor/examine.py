"""Everything that is looked at, in the order in which a new user needs it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeplan.doctor import machine
from pipeplan.doctor.executor import plan_finding, torch_findings
from pipeplan.doctor.finding import OK, WARNING, Finding
from pipeplan.emulate.machine import lacking


def examine(plan: Path | None = None) -> list[Finding]:
    """Look at this machine, and whether it can run its part of a plan. Some seconds: torch is imported, elsewhere."""
    with ThreadPoolExecutor() as others:
        torch = others.submit(torch_findings)
        networks = others.submit(emulation)
        part = None if plan is None else others.submit(plan_finding, plan)
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
    """Whether servers can be emulated here."""
    need = "pipeplan replay"
    found, _, todo = lacking(processes=True).rpartition("; ")
    if todo:
        return Finding("emulation", WARNING, found, need, todo)
    return Finding("emulation", OK, "namespaces, ip and tc work: servers can be emulated", need)
