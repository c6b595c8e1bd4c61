"""Pure functions from evidence to findings, registered by name."""
