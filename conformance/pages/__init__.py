"""Files of the repository that are generated: how each is made, and whether it is that of today."""
