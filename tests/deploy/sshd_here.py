"""An ssh server on this machine, with keys, settings and a port of its own, that ends with the test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from deployed import free_ports

HOSTS = ("gpu1", "gpu2")


class Sshd:
    """The server. For the `ssh` in the folder `path`, to be put first on PATH, all `HOSTS` are this machine."""

    def __init__(self, folder: Path) -> None:
        daemon = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if daemon is None or not all(map(shutil.which, ("ssh", "ssh-keygen"))):
            pytest.skip("needs openssh-server and openssh-client")
        self._daemon = daemon
        self.folder, self.path = folder, folder / "bin"
        self._process: subprocess.Popen[bytes] | None = None
        self.path.mkdir(parents=True)
        (self.port,) = free_ports()

    def __enter__(self) -> Self:
        for name in ("host", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        settings = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "StrictModes": "no",  # the folder may be in /tmp
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "yes",
            "PidFile": self.folder / "pid",
        }
        (self.folder / "sshd").write_text("".join(f'{name} "{value}"\n' for name, value in settings.items()))
        (self.folder / "ssh").write_text(
            f"Host {' '.join(HOSTS)}\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentitiesOnly yes\n"
            f'  IdentityFile "{self.folder}/key"\n  UserKnownHostsFile "{self.folder}/known"\n'
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        )
        shim = self.path / "ssh"
        shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{self.folder}/ssh" "$@"\n')
        shim.chmod(0o755)
        if os.geteuid() == 0:
            # sshd confines its children there; the service of the package would make the folder
            Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen([self._daemon, "-D", "-e", "-f", self.folder / "sshd"], stderr=log)
        deadline = time.monotonic() + 20
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                pytest.skip(f"sshd does not start here: {(self.folder / 'log').read_text().strip()}")
            time.sleep(0.02)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True
