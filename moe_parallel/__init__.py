"""Mixture-of-experts language models whose experts choose themselves, on Megatron-Core."""

__version__ = "0.1.0"
