"""The processes that run as ranks, and the controller that starts, watches and replaces them."""
