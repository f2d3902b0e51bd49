"""Megatron-Core GPT models with experts, built from a configuration."""
