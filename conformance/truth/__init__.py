"""The executable definition of DDP: a program runs, unchanged, on plain ranks and on the plainest DDP."""
