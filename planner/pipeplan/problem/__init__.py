"""Problems: a profile, a cluster and options, and the space of plans that they span.

This package holds the options, the units of a model and the cuts between them, the shapes of uniform grids, and the
reader of a stored plan.json. The package neither searches for plans nor computes costs.
"""
