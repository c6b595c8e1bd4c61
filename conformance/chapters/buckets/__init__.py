"""Chapter buckets: Buckets and their collectives."""
