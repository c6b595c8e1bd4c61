"""Chapter fusion: Compiled modules: fused reductions."""
