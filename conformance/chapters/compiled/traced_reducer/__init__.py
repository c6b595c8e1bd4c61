"""Chapter traced_reducer: Compiled modules: gradients averaged in the graph."""
