"""Adapters that let other projects' DDPs be called like torch's; each imports its library when a rank needs it."""
