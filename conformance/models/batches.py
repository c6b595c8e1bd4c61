"""The data of one micro-batch: different for every rank, step and micro-batch, and the same in every process."""

from __future__ import annotations

import functools
import hashlib
import io
from importlib import resources

import numpy as np
import torch
from torch import Tensor


def mixed_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the 1797 images (1797 x 1 x 8 x 8, float32, 0..1) and their labels (int64)."""
    data = resources.files("conformance.models").joinpath("data/digits.npz").read_bytes()
    with np.load(io.BytesIO(data)) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32) / 16.0).unsqueeze(1)
        return images, torch.from_numpy(arrays["labels"].astype(np.int64))


@functools.cache
def text() -> tuple[Tensor, str]:
    """Return the text as indices into its alphabet (int64), and that alphabet, sorted."""
    content = resources.files("conformance.models").joinpath("data/founding_documents.txt").read_text("ascii")
    alphabet = "".join(sorted(set(content)))
    index = {character: position for position, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in content]), alphabet


class Batch:
    """One micro-batch of one rank, with a random generator of its own: the order of calls matters."""

    def __init__(self, seed: int, rank: int, step: int, micro: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rank = rank
        self.step = step
        self.micro = micro
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(mixed_seed("batch", seed, rank, step, micro))

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal values of `shape`, of the scenario's dtype."""
        kind = torch.complex64 if self.dtype.is_complex else torch.float32
        drawn = torch.float64 if self.dtype == torch.float64 else kind
        return torch.randn(*shape, generator=self._generator, dtype=drawn).to(self.device, self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers (int64) in [0, high) of `shape`."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def digits(self, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` digit images (size x 1 x 8 x 8, the scenario's dtype) and their labels."""
        images, labels = digits()
        chosen = torch.randint(len(images), (size,), generator=self._generator)
        return images[chosen].to(self.device, self.dtype), labels[chosen].to(self.device)

    def text(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Return `size` excerpts of `length` characters and the characters that follow each (both size x length)."""
        characters, _ = text()
        starts = torch.randint(len(characters) - length, (size, 1), generator=self._generator)
        chosen = starts + torch.arange(length + 1)
        window = characters[chosen].to(self.device)
        return window[:, :-1], window[:, 1:]
