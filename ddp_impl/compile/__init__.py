"""What `torch.compile` does with a wrapped module: graphs cut at bucket boundaries, or gradients averaged in the graph."""
