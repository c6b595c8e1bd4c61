"""The processes that play the ranks, and the controller that watches them."""
