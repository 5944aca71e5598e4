# SPDX-License-Identifier: Apache-2.0
"""A small causal transformer over characters: what comes before a position predicts the character at it.

Source: Vaswani et al., "Attention Is All You Need", 2017; with the norm before each part as in Radford et al.,
"Language Models are Unsupervised Multitask Learners", 2019.
"""

import numpy as np

from singa_lite import autograd, layer, model, tensor


class Block(layer.Layer):
    """Attention to earlier positions, then two Linears at each position; both are added to what came in."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.attention_norm = layer.LayerNorm(width)
        self.attention = layer.MultiHeadAttention(num_heads, causal=True)
        self.norm = layer.LayerNorm(width)
        self.grow = layer.Linear(width, 4 * width)
        self.shrink = layer.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.shrink(autograd.gelu(self.grow(self.norm(x))))


class Transformer(model.Model):
    """Ids (batch, length) of characters -> logits (batch, length, num_characters) of the character after each.

    Args:
        num_characters: how many different ones there are.
        length: the longest input.
        width: numbers that stand for a character.
    """

    def __init__(self, num_characters, length=128, num_layers=4, width=128, num_heads=4):
        super().__init__()
        self.characters = layer.Embedding(num_characters, width)
        self.positions = layer.Embedding(length, width)
        self.blocks = [Block(width, num_heads) for _ in range(num_layers)]
        self.norm = layer.LayerNorm(width)
        self.head = layer.Linear(width, num_characters)

    def initialize(self, x):
        self.numbers = tensor.from_numpy(np.arange(x.shape[1], dtype=np.int32), x.device)

    def forward(self, x):
        x = self.characters(x) + self.positions(self.numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        """x and y: ids (batch, length); y has the character after each of x."""
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(
            autograd.reshape(out, (-1, out.shape[2])), autograd.reshape(y, (-1,))
        )
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss
