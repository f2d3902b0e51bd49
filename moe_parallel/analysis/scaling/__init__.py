"""Scaling studies: the same training on more nodes, and what its records show."""
