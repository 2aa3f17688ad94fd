"""The fastest plan with everything charged that workers share: network cards, ports and cores.

`resource_levels` has what is shared, `stage_charges` what one stage adds to its load, and `shared_resources` adds that
up stage by stage. `charging_search` is the part of the searches that charges it, and `charged_search` decides whether a
plan keeps within a pace. `charged_pipelines` finds the fastest one, and `charged_result` has it go on from the bounds
that the searches without shared resources have proven.
"""
