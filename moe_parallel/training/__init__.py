"""Training: the loop, the optimizer, and the checkpoints that let a run stop and continue."""
