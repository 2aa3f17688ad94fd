"""`python -m pipeplan_launch.launchers.ssh …`: starts a plan on hosts that are reached by ssh. launch-ssh.sh calls it.

1. Read the options (`ssh_options`) and the hosts (`hosts_file`).
2. With `--copy`, bring the plan to all hosts (`ssh_copy`).
3. Check whether all hosts can take part (`ssh_check`). If one cannot, training does not start.
4. Run launch.sh on all hosts and pass on requests to stop (`ssh_training`, and on each host `host_supervisor`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from pipeplan_launch import launch_secret
from pipeplan_launch.errors import LaunchError, terminal_line
from pipeplan_launch.job_reference import file_of
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_launch.launchers.script_arguments import check_digest, parse_script_arguments
from pipeplan_launch.launchers.ssh_check import check_hosts
from pipeplan_launch.launchers.ssh_connection import Launch
from pipeplan_launch.launchers.ssh_copy import copy_to_all
from pipeplan_launch.launchers.ssh_options import USAGE, SshOptions
from pipeplan_launch.launchers.ssh_requests import Abandoned, HostRequests
from pipeplan_launch.launchers.ssh_training import STOPPED, Training
from pipeplan_launch.plan.stage_files import load_plan

INVALID = 2
"""Exit status after an error line."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: facts of the plan, `--`, then the user's arguments. Returns the exit status."""
    _on_signals(_abandon)
    try:
        plan, user_arguments = _parse(sys.argv[1:] if arguments is None else arguments)
        options = SshOptions.parse(user_arguments, os.environ, _working_folder())
        if options.help:
            print(USAGE, end="")
            return 0
        return _launch(plan, options)
    except LaunchError as error:
        print(f"error: {terminal_line(error)}", file=sys.stderr)
        return INVALID
    except Abandoned:
        return STOPPED


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's facts, which launch-ssh.sh contains, and the user's arguments."""
    parser = argparse.ArgumentParser(prog="python -m pipeplan_launch.launchers.ssh", allow_abbrev=False)
    parser.add_argument("--servers", required=True, type=int, help="servers of the plan")
    parser.add_argument("--python", required=True, help="interpreter that hosts try first, as launch.sh does")
    parser.add_argument("--model-file", default="", help="file that the workers load the model from, if there is one")
    return parse_script_arguments(parser, arguments)


def _launch(plan: argparse.Namespace, options: SshOptions) -> int:
    hosts = _hosts(plan, options)
    address = options.address or hosts[0].address
    secret = launch_secret.read_secret(os.environ) or launch_secret.new_secret()
    launch = Launch(
        hosts=hosts,
        plan_folder=plan.plan,
        digest=plan.digest,
        python=plan.python,
        ssh=options.ssh,
        workdir=options.workdir,
        grace=options.grace,
        copy=options.copy,
        port=options.port,
        variables=[f"{launch_secret.VARIABLE}={secret}", *options.variables],
        arguments=options.launch_arguments,
    )
    with HostRequests(launch) as requests:
        if options.copy and not copy_to_all(requests, [*_model_files(plan), *options.copy_too]):
            return INVALID
        ready = check_hosts(requests, address)
        if ready is None:
            return INVALID
    training = Training(ready, options.label)
    _on_signals(training.stop)
    return training.run()


def _hosts(plan: argparse.Namespace, options: SshOptions) -> list[Host]:
    """The hosts that take part. Raises `LaunchError` for invalid options, plans or hosts files."""
    if not options.hosts_file:
        raise LaunchError("say where to run: --hosts FILE, with one host a line (--help tells more)")
    if not os.access(options.hosts_file, os.R_OK):
        raise LaunchError(f"cannot read {options.hosts_file}")
    if Path(plan.plan, "stages", "stage-0.json").is_file():  # else the hosts alone have the plan
        check_digest(plan.plan, plan.digest, "ssh")
    options.check()
    hosts = read_hosts(options.hosts_file)
    if len(hosts) < plan.servers:
        raise LaunchError(f"the plan has {plan.servers} servers, and {options.hosts_file} names {len(hosts)} hosts")
    if len(hosts) > plan.servers:
        print(
            f"note: only the first {plan.servers} hosts of {options.hosts_file} are used: the plan has no more servers",
            file=sys.stderr,
        )
    return hosts[: plan.servers]


def _model_files(plan: argparse.Namespace) -> list[str]:
    """The file of the model, if it has one: as the plan names it now, if the plan is here, since it may have moved."""
    if not Path(plan.plan, "stages", "stage-0.json").is_file():
        return [plan.model_file] if plan.model_file else []
    file = file_of(load_plan(Path(plan.plan)).model_ref)
    return [] if file is None else [str(file)]


def _working_folder() -> str:
    """The working folder by the shell's name, in which hosts may have a symbolic link that points elsewhere there."""
    named = os.environ.get("PWD", "")
    if os.path.isabs(named) and os.path.isdir(named) and os.path.samefile(named, "."):
        return named
    return os.getcwd()


def _on_signals(act: Callable[[], None]) -> None:
    """Let signals call `act`, except those that this process was started to ignore (nohup)."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def _abandon() -> None:
    for number in _SIGNALS:  # a further signal must not interrupt the cleanup
        signal.signal(number, signal.SIG_IGN)
    raise Abandoned


if __name__ == "__main__":
    sys.exit(main())
