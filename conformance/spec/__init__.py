"""Reads the specification: the catalogue of requirements and profiles."""
