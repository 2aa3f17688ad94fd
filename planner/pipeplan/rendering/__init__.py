"""From a solved problem to files: the plan folder with its stage files, and the launch scripts that start it.

Files for other trainers are written by `pipeplan.exports`.
"""
