"""`pipeplan calibrate`: a profile and a cluster that predict the measured step times of runs. docs/estimate.md.

Reading a run folder is the task of `pipeplan.run_data`.
"""
