"""All checks, in the order in which a new user needs what they check."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeplan.first_steps import doctor_machine
from pipeplan.first_steps.doctor_executor import check_plan_here, check_torch
from pipeplan.first_steps.doctor_machine import OK, WARNING, DoctorFinding
from pipeplan.replay.requirements import missing_requirement


def examine_machine(plan: Path | None = None) -> list[DoctorFinding]:
    """Check this machine, and whether it can run its part of a plan.

    Takes some seconds, because another process imports torch.
    """
    with ThreadPoolExecutor() as executor:
        torch = executor.submit(check_torch)
        networks = executor.submit(check_emulation)
        part = None if plan is None else executor.submit(check_plan_here, plan)
        own = [
            doctor_machine.check_python(),
            doctor_machine.check_devices(),
            doctor_machine.check_folder(Path.cwd()),
            doctor_machine.check_temporary_folder(),
            doctor_machine.check_shared_memory(),
            doctor_machine.check_port(os.environ),
            doctor_machine.check_threads(os.environ),
        ]
        return [*own[:2], *torch.result(), *own[2:], networks.result(), *([] if part is None else [part.result()])]


def check_emulation() -> DoctorFinding:
    """Whether servers can be emulated on this machine."""
    need = "pipeplan replay"
    found, _, todo = missing_requirement(processes=True).rpartition("; ")
    if todo:
        return DoctorFinding("emulation", WARNING, found, need, todo)
    return DoctorFinding("emulation", OK, "namespaces, ip and tc work: servers can be emulated", need)
