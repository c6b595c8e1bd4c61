"""What surrounds a training in its process, and whether something of it has changed that nobody may change."""
