"""The DDPs under test, found by name."""
