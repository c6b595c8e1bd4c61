"""Chapters about `torch.compile`: graph splitting, the traced reducer and fused all-reduces share these programs."""
