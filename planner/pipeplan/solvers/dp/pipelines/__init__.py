"""The fastest pipeline on one component of the cluster, by searches within one pace after another.

`choose_search` selects the search for a cluster and a schedule, and `pipeline_searches` narrows the pace down.
"""
