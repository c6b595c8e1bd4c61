"""The templates of `ddp-conformance new`: a small package for a backend or a DDP that passes `smoke` unchanged."""
