"""What `ddp-conformance new` writes: a small package for a backend or a DDP, which passes the smoke ladder at once."""
