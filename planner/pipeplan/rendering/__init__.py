"""Writes a solved problem to files: the plan folder with its stage files, and the launch scripts that start it.

`pipeplan.exports` writes files for other trainers.
"""
