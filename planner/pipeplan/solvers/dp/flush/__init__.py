"""The searches for the fastest batch under a flush schedule, from one update to the next.

`uniform_flush` and `heterogeneous_flush` extend the searches over cuts by the time of a batch (`terms.batch_limit`);
`batch_plans` computes the batch of one pipeline that was found.
"""
