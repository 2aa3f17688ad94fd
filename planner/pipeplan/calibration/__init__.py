"""`pipeplan calibrate`: a profile and a cluster that predict the measured step times of runs.

`pipeplan.run_data` reads run folders.
"""
