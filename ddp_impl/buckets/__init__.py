"""Which gradients share a bucket, and how they move into it and out of it."""
