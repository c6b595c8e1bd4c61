"""Chapter pairs: Pairs of features."""
