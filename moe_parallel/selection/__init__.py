"""Selection rules, which are pure functions from scores to choices, and expert capacity."""
