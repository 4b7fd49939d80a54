"""A light causal video decoder that replaces the VAE's at a fraction of its cost, for previews and live use.

    pipe.set_decoder(LightDecoder.from_file("taew2_1.pth").to(torch.bfloat16))

It reads files of TAEHV's published layout (weights under ``decoder.N...``; none are shipped here). The network works on
single frames: three stages of three memory blocks, each block seeing its input one frame ago, and after each stage a
layer that makes one or two frames of one, and a spatial upsampling. So the past is one frame a memory block.

Shapes: B rows, C latent channels, n latent frames, h x w latent size; frames in flat form are (B * n, channels, h, w).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..checkpoints.files import read_checkpoint

TIME_FACTORS = (1, 2, 2)
"""Frames made of one by each stage, as in the files for Wan 2.1 and 2.2: 4 pixel frames a latent frame."""
BLOCKS_PER_STAGE = 3
INPUT_LIMIT = 3.0
_PREFIX = "decoder."
_STAGE_KEYS = 6
_FIRST_STAGE_KEY = 3


class _MemoryBlock(nn.Module):
    """Residual block over a frame and the one before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {"0": 2 * width, "2": width, "4": width}
        self.conv = nn.ModuleDict({key: nn.Conv2d(size, width, 3, padding=1) for key, size in sizes.items()})

    def forward(self, frames: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Both (frames, width, h, w) -> the same."""
        hidden = torch.cat([frames, past], dim=1)
        hidden = torch.relu(self.conv["0"](hidden))
        hidden = torch.relu(self.conv["2"](hidden))
        return torch.relu(self.conv["4"](hidden) + frames)


class _TimeGrowth(nn.Module):
    """Makes ``factor`` frames of each one."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * factor, 1, bias=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(frames, width, h, w) -> (frames * factor, width, h, w), the new frames of one side by side."""
        width = frames.shape[1]
        return self.conv(frames).unflatten(1, (-1, width)).flatten(0, 1)


class LightDecoder(nn.Module):
    """Decoder of TAEHV's layout, from normalised latents to pixels.

    Args:
        latent_channels: C, 16 for Wan 2.1.
        widths: channels of the three stages and of the last layers.
        time_factors: frames that each stage makes of one.
        patch_size: pixels along each side that the last layer makes at once; 2 for Wan 2.2.

    Raises:
        ValueError: not four widths, or time factors other than three of 1 or 2.
    """

    def __init__(
        self,
        latent_channels: int = 16,
        widths: Sequence[int] = (256, 128, 64, 64),
        time_factors: Sequence[int] = TIME_FACTORS,
        patch_size: int = 1,
    ) -> None:
        super().__init__()
        if len(widths) != 4 or len(time_factors) != 3 or not set(time_factors) <= {1, 2}:
            raise ValueError(
                f"a light decoder has four widths and three time factors of 1 or 2, got {tuple(widths)} and "
                f"{tuple(time_factors)}."
            )
        self.latent_channels = latent_channels
        self.patch_size = patch_size
        self.widths = tuple(widths)
        self.time_factors = tuple(time_factors)
        layers: dict[str, nn.Module] = {"1": nn.Conv2d(latent_channels, widths[0], 3, padding=1)}
        for stage, factor in enumerate(time_factors):
            key, width = _FIRST_STAGE_KEY + _STAGE_KEYS * stage, widths[stage]
            layers |= {str(key + block): _MemoryBlock(width) for block in range(BLOCKS_PER_STAGE)}
            layers[str(key + 4)] = _TimeGrowth(width, factor)
            layers[str(key + 5)] = nn.Conv2d(width, widths[stage + 1], 3, padding=1, bias=False)
        layers["22"] = nn.Conv2d(widths[-1], 3 * patch_size**2, 3, padding=1)
        self.decoder = nn.ModuleDict(layers)

    @classmethod
    def from_file(cls, path: str | PathLike[str], time_factors: Sequence[int] = TIME_FACTORS) -> LightDecoder:
        """Load a file (.pth, .pt, .safetensors) of TAEHV's layout in float32; the encoder in it is left out.

        Widths, channels and patch size are read from the weights.

        Raises:
            FileNotFoundError: no such file.
            ValueError: weights are missing, too many or of shapes that do not fit; nothing is half loaded.
        """
        return cls.from_state_dict(read_checkpoint(Path(path)), time_factors)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], time_factors: Sequence[int] = TIME_FACTORS) -> LightDecoder:
        """As ``from_file``, from weights by name."""
        weights = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
        keys = ["1", *(str(_FIRST_STAGE_KEY + 5 + _STAGE_KEYS * stage) for stage in range(3)), "22"]
        names = [f"{_PREFIX}{key}.weight" for key in keys]
        absent = [name for name in names if name not in weights]
        if absent:
            raise ValueError(
                f"no decoder of TAEHV's layout: {', '.join(absent)} missing among {len(weights)} weights under "
                f"'{_PREFIX}'. Give a file such as taew2_1.pth or taew2_2.pth."
            )
        first, *outs, last = (weights[name].shape for name in names)
        if last[0] % 3 or round((last[0] / 3) ** 0.5) ** 2 * 3 != last[0]:
            raise ValueError(f"{names[-1]} makes {last[0]} channels; allowed are 3 * patch ** 2.")
        widths = [first[0], *(shape[0] for shape in outs)]
        with torch.device("meta"):
            decoder = cls(first[1], widths, time_factors, round((last[0] / 3) ** 0.5))
        decoder._assign(weights)
        return decoder

    def _assign(self, weights: dict[str, torch.Tensor]) -> None:
        own = self.state_dict()
        for stage in range(3):
            name = f"{_PREFIX}{_FIRST_STAGE_KEY + 4 + _STAGE_KEYS * stage}.conv.weight"
            # A stage may be stored with two frames where one is used: then it is the later one.
            if name in weights and weights[name].shape[0] > own[name].shape[0]:
                weights[name] = weights[name][-own[name].shape[0] :]
        faults = [f"{name} is missing" for name in own if name not in weights]
        faults += [f"{name} is unknown" for name in weights if name not in own]
        faults += [
            f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
            for name in own
            if name in weights and weights[name].shape != own[name].shape
        ]
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise ValueError(f"weights do not fit a light decoder: {'; '.join(faults[:5])}{more}.")
        self.load_state_dict({name: value.float().clone() for name, value in weights.items()}, assign=True)
        self.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that it computes in."""
        return self._first.weight.dtype

    @property
    def _first(self) -> nn.Conv2d:
        return cast(nn.Conv2d, self.decoder["1"])

    @property
    def temporal_factor(self) -> int:
        """Pixel frames per latent frame after the first."""
        return self.time_factors[0] * self.time_factors[1] * self.time_factors[2]

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along each side."""
        return 8 * self.patch_size

    def state_shapes(self, batch: int, height: int, width: int) -> list[tuple[int, ...]]:
        """Shape of each memory block's state for latents of (height, width)."""
        return [
            (batch, channels, height * 2**stage, width * 2**stage)
            for stage, channels in enumerate(self.widths[:3])
            for _ in range(BLOCKS_PER_STAGE)
        ]

    def empty_state(self, batch: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
        """The past of a video that begins: a frame of zeros a memory block."""
        weight = self._first.weight
        return tuple(weight.new_zeros(shape) for shape in self.state_shapes(batch, height, width))

    def forward(
        self, latents: torch.Tensor, state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Decode n latent frames after the past in ``state``; nothing is mutated.

        Args:
            latents: (B, C, n, h, w), normalised.
            state: a frame (B, width, h', w') a memory block.

        Returns: pixels (B, 3, frames, H, W) float32 in [-1, 1], ``temporal_factor * n`` frames, and the new state. Of
            a video's first latent frame all but the last pixel frame are of no use.
        """
        batch = latents.shape[0]
        frames = latents.to(self.dtype).transpose(1, 2).flatten(0, 1)
        frames = torch.relu(self.decoder["1"](torch.tanh(frames / INPUT_LIMIT) * INPUT_LIMIT))
        new_state: list[torch.Tensor] = []
        for stage in range(3):
            key = _FIRST_STAGE_KEY + _STAGE_KEYS * stage
            for block in range(BLOCKS_PER_STAGE):
                past, last = _shifted(frames, state[len(new_state)], batch)
                new_state.append(last)
                frames = self.decoder[str(key + block)](frames, past)
            # A 1x1 convolution and nearest upsampling commute; this order takes a quarter of the arithmetic.
            frames = nn.functional.interpolate(self.decoder[str(key + 4)](frames), scale_factor=2, mode="nearest")
            frames = self.decoder[str(key + 5)](frames)
        pixels = nn.functional.pixel_shuffle(self.decoder["22"](torch.relu(frames)), self.patch_size)
        video = pixels.float().clamp_(0.0, 1.0) * 2.0 - 1.0
        return video.unflatten(0, (batch, -1)).transpose(1, 2), tuple(new_state)


def _shifted(frames: torch.Tensor, past: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each frame's predecessor, flat, and the last frame (B, ...) as a tensor of its own."""
    rows = frames.unflatten(0, (batch, -1))
    before = torch.cat([past[:, None], rows[:, :-1]], dim=1)
    return before.flatten(0, 1), rows[:, -1].clone()
