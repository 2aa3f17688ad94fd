"""The self-check: trains the user's own module and the traced, split program on the same samples, and compares them.

The check runs when a model is profiled and when a run starts (`self_check.py`). The job stays unchanged.
"""
