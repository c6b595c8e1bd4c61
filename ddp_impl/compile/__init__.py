"""Wrapped modules under `torch.compile`: graphs cut at bucket boundaries, or gradients averaged in the graph."""
