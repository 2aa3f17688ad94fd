"""The parts that all searches over cuts are made of: states, candidate stages, and bounds on replicas and workers.

`search_states` has the states at a cut and which of them dominates which, `candidate_placements` the stages that are
tried in front of them, `stage_sizing` the replicas and depths of these, and `worker_bounds` the workers that the
stages in front of a cut need at least. The searches themselves are in `steady` and `flush`.
"""
