"""Helpers that are independent of pipelines: files, graphs, units, text and interrupts.

Files are read with a size limit and clear errors, and written whole or not at all. Code that depends on profiles,
clusters or plans belongs in other packages.
"""
