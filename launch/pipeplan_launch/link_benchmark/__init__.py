"""Measures messages and all-reduces between workers, with the transport that the executor uses.

All pairs are measured first, then every level of the cluster. Finding the levels in the measured times is the task of
the caller, who passes a function for it.
"""
