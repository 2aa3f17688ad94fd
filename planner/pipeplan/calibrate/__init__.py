"""Calibration: fits a profile and a cluster to measured runs (`pipeplan calibrate`, docs/calibrate.md)."""
