"""DDPs that are wrong on purpose: what a suite is worth shows in which of them it catches."""
