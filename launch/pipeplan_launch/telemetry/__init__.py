"""Records of a run: metrics, memory, timelines, the run folder, progress lines and the final table.

`difference` explains why the measured step time differs from the predicted step time.
"""
