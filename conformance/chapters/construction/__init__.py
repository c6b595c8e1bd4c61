"""Chapter construction: Construction and the wrapper."""
