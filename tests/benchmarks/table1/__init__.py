"""Table 1 of the PipeDream paper: its rows, and predictions for them."""
