"""Character-level language models on the text: attention, recurrence, tied weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.models.batches import Batch, text
from conformance.models.catalogue import ModelFixture

CONTEXT = 32


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # softmax would cancel the bias of the keys
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        size, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(size, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(size, length, width))
        return hidden + self.contract(F.gelu(self.expand(self.norm2(hidden))))


class Gpt(nn.Module):
    """A small GPT: size x length characters (length <= 32) to size x length x alphabet logits."""

    def __init__(self, *, alphabet: int, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.characters(characters) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class TiedLstm(nn.Module):
    """An LSTM whose output layer is its embedding: one parameter with two names and two uses."""

    def __init__(self) -> None:
        super().__init__()
        alphabet, width = len(text()[1]), 16
        self.embedding = nn.Embedding(alphabet, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, alphabet)
        self.decoder.weight = self.embedding.weight

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(characters))
        return self.decoder(hidden)


def text_loss(model: nn.Module, characters: Tensor, following: Tensor) -> Tensor:
    """Return the cross entropy of the `following` characters (both size x length)."""
    return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def _excerpts_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return 8 times the cross entropy on 4 excerpts of 16 characters: its gradients fill the exact range better."""
    return 8 * text_loss(model, *batch.text(4, 16))


FIXTURES = (
    ModelFixture("gpt", lambda: Gpt(alphabet=len(text()[1])), _excerpts_loss),
    ModelFixture("lstm", TiedLstm, _excerpts_loss),
)
