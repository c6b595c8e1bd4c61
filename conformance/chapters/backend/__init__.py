"""Chapters about a backend by itself: what it owes every caller, whoever that is, and no DDP in the way."""
