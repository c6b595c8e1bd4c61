"""Compares step times of a DDP with those of torch's DDP."""
