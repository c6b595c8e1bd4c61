"""The smoke ladder: checks a backend's adapter, from its import to one training step."""
