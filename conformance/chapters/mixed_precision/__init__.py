"""Chapter mixed_precision: Mixed precision."""
