"""A simulated accelerator: a torch device with streams, events and roundings of its own, which finds races."""
