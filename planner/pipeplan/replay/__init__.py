"""Replays a plan without its hardware: the real executor on emulated servers of this machine. docs/replay.md.

This package scales bytes and times, writes the plan folder that the executor is given, starts
`pipeplan_launch.emulation`, and compares what was measured with what was predicted. Simulated time is the business of
`pipeplan.simulation`.
"""
