"""Table 1 of the PipeDream paper: its rows, predictions for them, and experiments on what the predictions depend on."""
