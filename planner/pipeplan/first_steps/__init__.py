"""The first minutes of a new user: `pipeplan init` and `pipeplan doctor`.

`init` writes a starter job file and cluster file. `doctor` examines this machine, torch, the self-test of the executor,
and a plan's part on this machine.
"""
