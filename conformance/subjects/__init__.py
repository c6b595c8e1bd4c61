"""The implementations under test, by name."""
