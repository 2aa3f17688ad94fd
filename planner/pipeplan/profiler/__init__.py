"""Profile a model: measure its layers on this machine, or estimate them for another device.

The entry point is `profiler.profile_model`. `measure_executor` works without torch, so that its trials can import torch
while this process does other work.
"""
