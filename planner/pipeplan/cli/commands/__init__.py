"""One module for each command, named after it. `pipeplan.cli` imports a module when its command is called.

The folder `pipeplan.cli.profile` has the four commands of `pipeplan profile`.
"""
