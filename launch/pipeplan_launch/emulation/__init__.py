"""Emulated servers: workers in network namespaces behind shaped links, with stages that sleep.

stage     description of an emulated stage, from its stage file; torch-free
program   an emulated stage as the engine runs it
network   the namespaces and their links; torch-free
traffic   counts the bytes that cross the links; torch-free
leash     ends the emulation when the process that started it is gone; torch-free
launches  a launcher on each server, in place of forked workers; torch-free
faults    injects a fault into a run under launchers; torch-free
__main__  makes the network and runs a plan folder's workers in it
"""
