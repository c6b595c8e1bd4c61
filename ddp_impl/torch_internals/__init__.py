"""Every private name of torch that `ddp_impl` depends on, in a file per subject: what it is needed for.

Nothing else in `ddp_impl` names one; a test keeps it so. `python -m ddp_impl.torch_internals` looks for them in the
installed torch; docs/torch_versions.md says in which versions each was seen.
"""
