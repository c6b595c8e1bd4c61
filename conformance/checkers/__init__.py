"""Checkers: pure functions that compare what ranks observed with what is expected, and return findings."""
