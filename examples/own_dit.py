#!/usr/bin/env python
"""Paged autoregressive attention in a plain PyTorch DiT: the cache and the op alone, no diffusers."""

from itertools import pairwise

import torch
from torch import nn

from diffusers_ardiff.attention import paged_write_attn
from diffusers_ardiff.cache import KVManager, KVShape, RingGeometry
from diffusers_ardiff.context import PagedForwardContext, PagedLayerInputs
from diffusers_ardiff.rope import Rotary, VideoRope, apply_rotary

HEADS, HEAD_DIM, LAYERS, CHANNELS, FRAMES, GRID = 4, 32, 3, 8, 2, (4, 6)
DIM, TOKENS = HEADS * HEAD_DIM, GRID[0] * GRID[1]  # of a token; of a frame


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, rotary: Rotary, inputs: PagedLayerInputs) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, HEAD_DIM)).unbind(2)
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        # Instead of scaled_dot_product_attention: writes the chunk's keys and values, attends over all that is visible.
        x = x + self.out(paged_write_attn(inputs, query, key, value).flatten(2))
        return x + self.mlp(self.norm2(x))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(CHANNELS, DIM), nn.Linear(1, DIM), nn.Linear(DIM, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, noisy: torch.Tensor, sigma: float, rotary: Rotary, forward: PagedForwardContext) -> torch.Tensor:
        x = self.embed(noisy) + self.time(noisy.new_tensor([sigma]))
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, forward.layer_inputs(layer))
        return self.head(x)


@torch.no_grad()
def generate(model: DiT, num_chunks: int) -> torch.Tensor:
    """Latents (1, tokens, channels) of a video; memory and time a chunk stay what they are, however long it gets."""
    geometry = RingGeometry(sink_tokens=TOKENS, window_tokens=4 * TOKENS, page_size=16)
    shape = KVShape(num_layers=LAYERS, num_heads=HEADS, head_dim=HEAD_DIM, itemsize=4)
    branch = KVManager(geometry, shape, dtype=torch.float32).open_session().branch()
    rope, chunks = VideoRope(head_dim=HEAD_DIM), []
    for chunk in range(num_chunks):
        rotary = rope([range(chunk * FRAMES, (chunk + 1) * FRAMES)], *GRID)
        latents = torch.randn(1, FRAMES * TOKENS, CHANNELS, generator=torch.Generator().manual_seed(chunk))
        for sigma, next_sigma in pairwise((1.0, 0.75, 0.5, 0.0, 0.0)):
            with PagedForwardContext([branch], num_tokens=FRAMES * TOKENS) as forward:
                latents = latents + (next_sigma - sigma) * model(latents, sigma, rotary, forward)
        forward.mark_committed()  # of all these forwards only the last counts: at sigma 0 it wrote the keys to keep
        chunks.append(latents)
    return torch.cat(chunks, dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    print("latents", tuple(generate(DiT().eval(), num_chunks=12).shape))
