"""Reads the specification: the catalogue of requirements, profiles, and the rows of docs/behaviours.md."""
