"""The fastest plan with everything charged that workers share: network cards, ports and cores.

`shared_resources` adds up the loads stage by stage, `charged_search` decides whether a plan keeps within a pace, and
`charged_pipelines` finds the fastest one, from the bounds that the searches without shared resources have proven.
"""
