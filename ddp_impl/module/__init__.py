"""The wrapped module: its parameters, replicas, precision."""
