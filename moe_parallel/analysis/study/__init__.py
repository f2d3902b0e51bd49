"""A comparison of systems of expert selection: who is compared, what was measured, how it looks."""
