"""Chapter optimizer_in_backward: Optimizer in backward."""
