"""What a configuration costs on a cluster, by arithmetic: memory, messages and time."""
