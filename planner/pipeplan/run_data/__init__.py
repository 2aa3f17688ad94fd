"""What a run of a plan measured, read from its run folder.

The executor writes these files (`pipeplan_launch.telemetry`); calibration, replanning and reports read them here.
"""
