"""What every rank runs to measure step times."""
