"""The two independent solvers (DP and ILP), their result, and the spaces of plans that both search."""
