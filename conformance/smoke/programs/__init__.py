"""The programs that ranks run on the rungs of the smoke ladder."""
