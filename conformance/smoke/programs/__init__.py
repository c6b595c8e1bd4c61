"""What every rank runs on the rungs of the smoke ladder."""
