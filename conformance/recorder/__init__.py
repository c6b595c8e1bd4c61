"""Writes down every collective of a rank, at the process group, and changes nothing about it."""
