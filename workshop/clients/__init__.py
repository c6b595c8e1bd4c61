"""Trainings as people write them, run with torch's DDP and with ours: no client may notice which one it has."""
