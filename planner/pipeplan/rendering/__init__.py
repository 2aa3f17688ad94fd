"""Writes a solved problem to files: the plan folder, and the scripts that start the plan."""
