"""Emulated servers: workers in network namespaces behind shaped links of one machine.

`pipeplan replay` starts this package as a process of its own. It makes the namespaces and links, runs a plan folder's
workers in them, counts the traffic, injects faults on demand, and removes everything when its parent is gone.
"""
