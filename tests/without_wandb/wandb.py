"""Hides Weights & Biases from the programs that tests start.

Megatron-Core imports it where it is installed, which takes two seconds a process. No such program
logs to it; tests/telemetry uses the real package.
"""

raise ImportError("hidden from this program")
