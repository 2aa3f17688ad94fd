"""From a solved problem to files: the plan folder, and what starts it."""
