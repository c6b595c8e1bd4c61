"""Waiting: for what ranks still work on, and how long a busy machine has kept processes waiting."""
