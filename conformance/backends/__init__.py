"""Backends and their devices behind one adapter."""
