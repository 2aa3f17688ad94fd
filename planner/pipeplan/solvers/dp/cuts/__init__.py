"""Which cuts are searched: `reduce_cuts` leaves out those that cannot matter, `selected_cuts` chooses good ones."""
