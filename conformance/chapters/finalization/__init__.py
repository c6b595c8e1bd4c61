"""Chapter finalization: gradients that the user makes final, and buckets that live no longer than a backward."""
