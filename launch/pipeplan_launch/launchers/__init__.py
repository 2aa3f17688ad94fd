"""Starts all servers of a plan from one machine. The scripts that `pipeplan export` writes call these modules.

`ssh` runs launch.sh on hosts over ssh, `slurm` runs it as the tasks of a SLURM job. No module here imports torch, so
that a laptop without torch can start the servers.
"""
