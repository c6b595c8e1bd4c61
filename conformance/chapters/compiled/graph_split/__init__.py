"""Chapter graph_split: Compiled modules: graphs cut at bucket boundaries."""
