"""A small network that reads colours and kinds off latents, so that sampled latents can be judged without decoding.

Words are the colours and the kinds, in this order: 6 + 3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .models import LATENT_CHANNELS
from .score import classify
from .shapes import COLORS, KINDS, Scenes

WORDS = len(COLORS) + len(KINDS)
CELL = 8  # pixels a side of a latent cell
STRONGEST = 2  # cells that decide whether a word is shown


class SceneReader(nn.Module):
    """Normalised latents (B, 16, F, 8, 8) -> share of each cell that shapes of each word cover (B, F, words, 8, 8)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv3d(LATENT_CHANNELS, width, (1, 3, 3), padding=(0, 1, 1)),
            nn.SiLU(),
            nn.Conv3d(width, width, (1, 3, 3), padding=(0, 1, 1)),
            nn.SiLU(),
            nn.Conv3d(width, WORDS, 1),
        )

    def logits(self, latents: torch.Tensor) -> torch.Tensor:
        """What `forward` returns before the sigmoid, in float32."""
        return self.net(latents).float().transpose(1, 2)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.logits(latents).sigmoid()


@dataclass(frozen=True)
class SceneJudge:
    """A trained, frozen reader, and what rendered frames show of a word that is there.

    enough: `strength` that 95 % of them reach; most: cells (summed shares) that 99 % of them stay under, by word, which
    tells one shape from two of the same colour.
    """

    reader: SceneReader
    enough: float
    most: torch.Tensor

    def loss(self, latents: torch.Tensor, wanted: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
        """Zero where every frame shows the wanted words, each once, and no others.

        wanted, judged: (B, words) bool; words that are not `judged` do not count. Returns (B,).
        """
        shares = self.reader(latents)
        shown = strength(shares)
        lacking = (self.enough - shown).clamp(min=0).square()
        excess = (shares.sum(dim=(-2, -1)) / self.most - 1).clamp(min=0)
        too_much = F.smooth_l1_loss(excess, torch.zeros_like(excess), reduction="none")
        loss = torch.where(wanted[:, None], lacking + too_much, shown.square())
        return (loss * judged[:, None]).sum(dim=-1).mean(dim=-1)


def cell_shares(video: torch.Tensor, scenes: Scenes) -> torch.Tensor:
    """What a perfect reader says about the rendered video (B, 3, 1 + 4n, H, W): (B, 1 + n, words, H / 8, W / 8)."""
    masks = classify(video).float()
    shares = F.avg_pool2d(masks.flatten(0, 2), CELL).view(*masks.shape[:3], video.shape[-2] // CELL, -1)
    shares = torch.cat([shares[:, :1], shares[:, 1:].unflatten(1, (-1, 4)).mean(dim=2)], dim=1)
    kinds = F.one_hot(scenes.kinds, len(KINDS)).float() * scenes.present[..., None]
    table = torch.zeros(len(masks), len(COLORS), len(KINDS), device=video.device)
    table.scatter_add_(1, scenes.colors[..., None].expand_as(kinds), kinds)
    return torch.cat([shares, torch.einsum("bfchw,bck->bfkhw", shares, table)], dim=2)


def wanted_words(scenes: Scenes) -> torch.Tensor:
    """Which colours and kinds are present: (B, words) bool."""
    kinds = F.one_hot(scenes.kinds, len(KINDS)).bool() & scenes.present[..., None]
    return torch.cat([scenes.wanted(), kinds.any(dim=1)], dim=1)


def strength(shares: torch.Tensor) -> torch.Tensor:
    """Mean share of each word over its strongest cells: (B, F, words, H, W) -> (B, F, words)."""
    return shares.flatten(-2).topk(STRONGEST, dim=-1).values.mean(dim=-1)


def train_scene_judge(latents: torch.Tensor, shares: torch.Tensor, steps: int, batch: int = 64) -> SceneJudge:
    """Fits a reader to normalised latents (N, 16, F, 8, 8) and their `cell_shares`."""
    reader = SceneReader().to(latents.device)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(latents), (batch,), device=latents.device)
        loss = F.binary_cross_entropy_with_logits(reader.logits(latents[rows]), shares[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == steps - 1:
            print(f"scene reader: loss {loss.item():.4f}", flush=True)
    shown, cells = strength(shares), shares.sum(dim=(-2, -1)).flatten(0, 1)
    enough = shown[shown > 0.1].quantile(0.05).item()
    return SceneJudge(reader.eval().requires_grad_(False), enough, cells.quantile(0.99, dim=0).clamp(min=1))
