"""The first minutes of a new user: `pipeplan init` and `pipeplan doctor`.

`init` writes a job file and a cluster file to begin with; `doctor` examines this machine, the executor's torch, the
emulated network, and a plan's part on this machine.
"""
