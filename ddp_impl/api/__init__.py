"""The wrapper: torch's arguments, attributes and methods, join, copies."""
