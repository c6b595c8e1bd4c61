"""Chapter neighbours: What stands beside a DDP."""
