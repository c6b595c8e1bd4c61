"""Waiting: the loop, its clock, all numbers of seconds, and how long a busy machine has kept processes waiting."""
