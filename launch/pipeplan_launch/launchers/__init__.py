"""Starts all servers of a plan from one machine. The script that `pipeplan export ssh` writes calls these modules.

`ssh` runs launch.sh on hosts over ssh, and `host_supervisor` runs it on each host. No module here imports torch, so
that a laptop without torch can start the servers.
"""
