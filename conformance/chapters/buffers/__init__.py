"""Chapter buffers: Buffers."""
