"""Helpers that know nothing of pipelines: files, graphs, units, text and interrupts.

Files are read with a limit and a clear message, and written whole or not at all. Anything that knows what a profile,
a cluster or a plan is belongs in a package of its own.
"""
