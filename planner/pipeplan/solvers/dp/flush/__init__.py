"""The fastest batch under a flush schedule: from one update to the next.

`batch_limit` adds up a batch's time stage by stage, `uniform_flush` and `heterogeneous_flush` extend the searches over
cuts by it, `batch_spaces` searches all spaces of plans, and `batch_plans` computes the batch of one pipeline.
"""
