"""Small runs that show what works on this machine: `python -m pipeplan_launch.selftest`.

Every run is a plan of its own, launched as launch.sh does, and its losses are compared with those of one process that
applies the formula for weight versions literally (`reference`). `cases` says what is run, `launches` runs it, `paths`
measures how fast messages travel. What was found is remembered for `--transport auto` (`pipeplan_launch.devices`).
"""
