"""`pipeplan calibrate`: fits a profile and a cluster so that they predict the measured step times of runs.

`pipeplan.run_data` reads run folders.
"""
