"""Reports: what a run leaves behind, for machines and for people."""
