"""Records every collective of a rank at the process group, without changing it."""
