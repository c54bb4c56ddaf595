"""Multi-head attention written out in Python: what `mha::MultiHeadAttention` mirrors by name."""

import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """softmax(Q K^T / sqrt(d_k)) V in num_heads heads, between four linear layers.

    query (N, L, d_model), key and value (N, S, d_model); mask broadcasts to (N, H, L, S) and
    blocks where it is 0. Returns the output (N, L, d_model) and the weights (N, H, L, S).
    """

    def __init__(self, d_model, num_heads, bias=True, dtype=None):
        super().__init__()
        if d_model % num_heads != 0:
            raise ValueError(f"d_model {d_model} is no multiple of num_heads {num_heads}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        # The order matters: it is the order in which the random numbers are drawn.
        self.W_q = nn.Linear(d_model, d_model, bias=bias, dtype=dtype)
        self.W_k = nn.Linear(d_model, d_model, bias=bias, dtype=dtype)
        self.W_v = nn.Linear(d_model, d_model, bias=bias, dtype=dtype)
        self.W_o = nn.Linear(d_model, d_model, bias=bias, dtype=dtype)

    def split_heads(self, x):
        """(N, T, d_model) -> (N, H, T, d_k)"""
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def merge_heads(self, x):
        """(N, H, T, d_k) -> (N, T, d_model)"""
        return x.transpose(1, 2).contiguous().view(x.size(0), x.size(2), self.d_model)

    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.W_o(self.merge_heads(weights @ v)), weights
