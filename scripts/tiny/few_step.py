"""Few-step first chunks: from the recipe's noise levels, learn where a fine ODE under guidance would end.

Flow matching predicts the mean of all that a noisy chunk may become. Eight steps are too few to make one thing of it
where much is open, as in a first chunk. Pairs of noisy states and their ODE's end have one answer, and guidance puts
more of the caption into it. (CausVid begins its few-step training with such pairs.) The teacher is the model itself, as it
is when the stage begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .captions import build_tokenizer
from .latents import LatentClips
from .models import LATENT_CHANNELS, encode_text
from .teacher_forcing import CHUNK, TOKENS_PER_FRAME, TextToLatents, TrainingContext

GUIDANCE = 3.0
SUBSTEPS = 3  # of the ODE between two noise levels of the recipe


@dataclass(frozen=True)
class Pairs:
    """N solved first chunks: states at S noise levels (N, S, 16, 3, 8, 8) and ends (N, 16, 3, 8, 8), float16; captions.

    token_ids: (N, 3, 24), as in `LatentClips`.
    """

    states: torch.Tensor
    ends: torch.Tensor
    token_ids: torch.Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Random states (count, 16, 3, 8, 8), indices of their noise levels (count,), their ends, one caption's ids each."""
        device = self.ends.device
        row = torch.randint(len(self.ends), (count,), generator=generator, device=device)
        level = torch.randint(self.states.shape[1], (count,), generator=generator, device=device)
        return self.states[row, level].float(), level, self.ends[row].float(), self.token_ids[row]


class FewSteps:
    """The teacher's solutions and the student's loss, for the noise levels `sigmas` of the recipe."""

    def __init__(
        self, model: TextToLatents, context: TrainingContext, sigmas: Sequence[float], device: torch.device
    ) -> None:
        self.model, self.context = model, context
        self.sigmas = torch.tensor(list(sigmas), device=device)
        empty = build_tokenizer()([""], padding="max_length", return_tensors="pt").input_ids
        self.empty = empty.to(device)

    @torch.no_grad()
    def solve(self, clips: LatentClips, count: int, batch: int, generator: torch.Generator) -> Pairs:
        """Solved chunks for `count` captions of the clips, `batch` at a time."""
        parts = []
        for _ in range(0, count, batch):
            ids = clips.draw(batch, generator)[2]
            parts.append((*self._solve(ids), ids))
        states, ends, token_ids = (torch.cat(part) for part in zip(*parts, strict=True))
        return Pairs(states, ends, token_ids)

    def _solve(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States (B, S, ...) and ends (B, ...) of chunks from fresh noise, for captions (B, 3, 24)."""
        count, device = len(token_ids), token_ids.device
        text = encode_text(self.model.text_encoder, torch.cat([token_ids[:, 0], self.empty.expand(count, -1)]))
        self._enter(2 * count, device)
        latents = torch.randn(count, LATENT_CHANNELS, CHUNK, 8, 8, device=device)
        states = []
        for sigma, following in zip(self.sigmas.tolist(), [*self.sigmas.tolist()[1:], 0.0], strict=True):
            states.append(latents.half())
            levels = torch.linspace(sigma, following, SUBSTEPS + 1).tolist()
            for here, there in pairwise(levels):
                timestep = torch.full((2 * count, CHUNK * TOKENS_PER_FRAME), 1000 * here, device=device)
                both = self.model.transformer(latents.repeat(2, 1, 1, 1, 1), timestep, text, return_dict=False)[0]
                asked, free = both.float().chunk(2)
                latents = latents + (there - here) * (free + GUIDANCE * (asked - free))
        return torch.stack(states, dim=1), latents.half()

    def loss(
        self, states: torch.Tensor, level: torch.Tensor, ends: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Squared error of the velocity that leads from the states straight to their ends."""
        self._enter(len(states), states.device)
        sigma = self.sigmas[level]
        timestep = (1000 * sigma)[:, None].expand(-1, CHUNK * TOKENS_PER_FRAME)
        velocity = self.model(states, timestep, token_ids).float()
        return (velocity - (states - ends) / sigma.view(-1, 1, 1, 1, 1)).square().mean()

    def _enter(self, batch: int, device: torch.device) -> None:
        """Sets the context for chunks without a clean half, at the start of a video."""
        self.context.halves = 1
        self.context.bias = None
        self.context.start = torch.zeros(batch, device=device)
