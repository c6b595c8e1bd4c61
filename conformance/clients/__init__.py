"""Trainings as people write them, run with torch's DDP and with ours: does a client notice which one it has?"""
