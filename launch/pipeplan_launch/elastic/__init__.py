"""Starting, joining, watching and stopping the processes of a run, and restarting them after a fault.

This package holds the rendezvous of every restart attempt, the process groups, the store with a timeout, signals, and
the graceful stop. It does not know what the workers compute.
"""
