"""Turns an unmodified `nn.Module` into a graph of layers, and the graph into one program per stage.

torch.export traces the model; the submodules that it cannot trace become opaque modules, each of them one layer.
`split` cuts the traced graph at the plan's boundaries.
"""
