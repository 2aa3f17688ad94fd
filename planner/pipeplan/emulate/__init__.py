"""Replaying a plan without its hardware: the real executor on emulated servers of this machine.

scaling   by how much bytes, rates and times differ from the real ones
servers   the cluster as a tree of switches and shaped cables
folder    the plan folder that the executor is given: stages that sleep
machine   what this machine lacks for it
run       one replay, from the plan folder to what was measured
measured  what the run and the counters of its cables show
outcome   what a replay comes to, for people and programs
"""
