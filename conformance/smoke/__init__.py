"""The smoke ladder: from an import to one step of training, one small question after the other."""
