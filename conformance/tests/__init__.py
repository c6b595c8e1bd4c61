"""The tests of the harness itself."""
