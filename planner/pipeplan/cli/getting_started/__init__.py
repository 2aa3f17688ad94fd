"""Commands for the first minutes: a job to begin with, what this machine lacks, documentation, completion in shells.

Starter files and findings about the machine are made by `pipeplan.first_steps`.
"""
