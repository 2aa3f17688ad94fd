"""Two independent solvers, what they return, and the space of plans that both search."""
