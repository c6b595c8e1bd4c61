"""Chapter compatibility: What backends leave out, and what users reach for."""
