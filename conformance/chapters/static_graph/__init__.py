"""Chapter static_graph: Static graph."""
