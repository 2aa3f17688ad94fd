"""All checks, in the order in which a new user needs what they check."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeplan.first_steps import doctor_machine
from pipeplan.first_steps.doctor_executor import check_plan_here, check_torch
from pipeplan.first_steps.finding import DoctorFinding


def examine_machine(plan: Path | None = None) -> list[DoctorFinding]:
    """Check this machine, and whether it can run its part of a plan.

    Takes some seconds, because another process imports torch.
    """
    with ThreadPoolExecutor() as executor:
        torch = executor.submit(check_torch)
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
        return [*own[:2], *torch.result(), *own[2:], *([] if part is None else [part.result()])]
