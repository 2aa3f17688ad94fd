"""Records of a run: metrics, memory, timelines, the run folder, progress lines and the final table.

`difference` says why the measured step time is not the predicted one.
"""
