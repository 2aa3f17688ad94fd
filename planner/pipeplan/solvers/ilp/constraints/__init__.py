"""The program of one pipeline: its variables and constraints, in groups that `pipeline_model` puts together.

`placement_model` places the stages, which `stage_choices` ties to whole sets of layers, and `boundary_model` adds the
links between them. `depth`, `memory` and `vertical_versions` limit what workers hold. `shared_weights`, `executor`,
`flush`, `charged` and `cards` add what a plan is charged; `least_crossing` bounds the traffic for `cards`.
`integer_program` numbers the constraints.
"""
