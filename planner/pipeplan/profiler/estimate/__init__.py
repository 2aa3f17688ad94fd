"""Estimates of a model's profile for a device that this machine does not have, from FLOPs, bytes and a device file."""
