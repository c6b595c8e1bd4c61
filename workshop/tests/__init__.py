"""Tests of what serves only this repository."""
