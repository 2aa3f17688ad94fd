"""Records of a run: metrics, memory, timelines, the run folder, progress lines and the final table.

`slowdown_cause` attributes the difference between the predicted and the measured step time.
"""
