"""Checkpoints of Megatron-LM: `torch_dist`, imported as run folders, and written for it to load."""
