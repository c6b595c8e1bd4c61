"""Chapter devices: what a DDP does with the streams of an accelerator."""
