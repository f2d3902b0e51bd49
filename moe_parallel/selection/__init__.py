"""Who decides: pure functions from scores to choices, and the capacity of experts."""
