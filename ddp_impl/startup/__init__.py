"""What Python processes started by a script under `python -m ddp_impl` run first."""
