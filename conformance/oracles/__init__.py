"""What must be observed: the truth without DDP, and how an expectation is written down. Pure."""
