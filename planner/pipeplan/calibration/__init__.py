"""From what runs measured to a profile and a cluster that predict them: `pipeplan calibrate`, docs/calibrate.md.

Reading a run folder is the task of `pipeplan.run_data`.
"""
