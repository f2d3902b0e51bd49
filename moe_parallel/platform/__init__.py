"""What the machine and its Megatron-Core need: CPU hosts, versions, devices, norms."""
