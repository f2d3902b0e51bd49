"""Adaptation to the machine and the version of Megatron-Core: CPU hosts, devices, norms, memory."""
