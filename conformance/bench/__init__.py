"""How fast a DDP is beside torch's own."""
