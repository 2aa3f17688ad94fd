"""Servers that are not there: workers in network namespaces behind shaped links, with stages that sleep.

stage     what an emulated stage does, as its stage file says it; torch-free
program   such a stage as the engine runs one
network   the namespaces and their links; torch-free
traffic   counts what crosses the links meanwhile; torch-free
leash     ends all of it when whoever asked for it is gone; torch-free
launches  a launcher on each server, in place of workers that are forked; torch-free
faults    breaks something in the middle of that; torch-free
__main__  makes the network, and runs a plan folder's workers in it
"""
