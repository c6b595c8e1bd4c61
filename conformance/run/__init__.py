"""A run: scenarios in their order, on ranks, judged; and what is known about it beforehand and afterwards."""
