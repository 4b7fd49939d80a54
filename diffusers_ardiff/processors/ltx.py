"""The LTX family: LTX-Video, and the video stream of LTX-2.

Norms are across heads, and so is the rotation: every head has angles of its own. LTX-2 gates heads and rotates
interleaved pairs or halves. Its video and audio see each other in every block; the cache holds video only, so paged
forwards keep the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..rope import Rotary, apply_rotary, apply_rotary_halves, spread_grid, store_angles
from ..transfer import upload
from .base import PagedSelfAttnProcessor, attend, project_out, refuse_mask
from .family import RopeFunction, Stack, TransformerFamily, register_family

_ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "heads", "set_processor")


def _project(
    attn: Any, hidden_states: torch.Tensor, rotary: Rotary | None, rotate: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (attn.heads, -1)
    query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, heads)
    key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, heads)
    if rotary is not None:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    return query, key, attn.to_v(hidden_states).unflatten(2, heads)


class PagedLTXProcessor(PagedSelfAttnProcessor):
    """Self-attention of LTX-Video over the paged cache."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape.

        Raises:
            ValueError: a dense mask is given while paged inputs are bound.
        """
        if self.inputs is None:
            return self.host_processor(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        refuse_mask(attention_mask)
        return project_out(attn, attend(self.inputs, *_project(attn, hidden_states, self.rotary, apply_rotary)))


class PagedLTX2Processor(PagedSelfAttnProcessor):
    """Self-attention of LTX-2's video stream over the paged cache."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: Rotary | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: Any = None,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape.

        Raises:
            ValueError: a dense mask or a perturbation is given while paged inputs are bound.
        """
        if self.inputs is None:
            perturbed = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
            rotary = (query_rotary_emb, key_rotary_emb)
            given = {name: value for name, value in perturbed.items() if value is not None}
            return self.host_processor(attn, hidden_states, encoder_hidden_states, attention_mask, *rotary, **given)
        refuse_mask(attention_mask)
        if perturbation_mask is not None:
            raise ValueError(
                "spatio-temporal guidance replaces attention by its values, which leaves no keys for later chunks; call "
                "the transformer without spatio_temporal_guidance_blocks while a forward is bound."
            )
        rotate = apply_rotary_halves if attn.rope_type == "split" else apply_rotary
        out = attend(self.inputs, *_project(attn, hidden_states, self.rotary, rotate))
        if attn.to_gate_logits is not None:
            out = out * (2 * torch.sigmoid(attn.to_gate_logits(hidden_states))).unsqueeze(-1)
        return project_out(attn, out)


@dataclass(frozen=True, kw_only=True)
class LTXRope:
    """Angles of LTX: coordinates as fractions of a base size, times frequencies that grow up to ``theta``.

    Attributes:
        heads, head_dim: the rotation spans all of them.
        bases: (frames, height, width) that count as 1.
        theta: the highest frequency is theta * pi / 2.
        coordinates: from indices of frames, rows and columns to coordinates in units of ``bases``.
        halves: see ``AxialRope``.
        dtype: of the angles. The highest frequency makes them so large that in float32, in which the host computes, they
            are off by 1e-3 from the first frame on, and by more with every frame.
        frequency_dtype: in which the frequencies are made, before they are rounded to ``dtype``.
    """

    heads: int
    head_dim: int
    bases: tuple[float, float, float]
    theta: float
    coordinates: Callable[[torch.Tensor, int], torch.Tensor]
    halves: bool = False
    dtype: torch.dtype = torch.float64
    frequency_dtype: torch.dtype = torch.float64

    def __call__(
        self, frame_positions: Sequence[Sequence[int]], height: int, width: int, device: torch.device | str = "cpu"
    ) -> Rotary:
        """Cosine and sine for tokens in frame-major order; arguments as in ``VideoRope``."""
        # Made on the device: with angles for every head they are as large as the queries.
        indices = spread_grid(
            upload(torch.tensor(frame_positions, dtype=self.dtype), device),
            torch.arange(height, dtype=self.dtype, device=device),
            torch.arange(width, dtype=self.dtype, device=device),
        )
        places = [self.coordinates(part, axis) / self.bases[axis] for axis, part in enumerate(indices)]
        angles = (torch.stack(places, dim=-1)[..., None] * 2 - 1) * self._frequencies(device)
        angles = angles.transpose(-1, -2).flatten(2)
        missing = self.heads * self.head_dim // 2 - angles.shape[-1]
        angles = torch.nn.functional.pad(angles, (missing, 0)).unflatten(2, (self.heads, -1))
        return store_angles(angles, halves=self.halves, device=device)

    def _frequencies(self, device: torch.device | str) -> torch.Tensor:
        exponents = torch.linspace(0, 1, self.heads * self.head_dim // 6, dtype=self.frequency_dtype, device=device)
        return (self.theta**exponents * math.pi / 2).to(self.dtype)


class LTXFamily(TransformerFamily):
    """LTX-Video."""

    name = "ltx"
    parts = ("transformer_blocks", "rope", "proj_in", "caption_projection", "time_embed", "config")
    absent = ("audio_proj_in",)
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn1", parts=_ATTN_PARTS),)

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        config = transformer.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a block's ``attn1``."""
        return PagedLTXProcessor(attn.processor)

    def make_rope(
        self,
        transformer: Any,
        *,
        scale: tuple[float, float, float] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> RopeFunction:
        """Angles of tokens at absolute frames.

        Args:
            transformer: a model of the family.
            scale: what the host takes as ``rope_interpolation_scale``; None: positions as they are.
            dtype: of the angles; float32 gives the host's own rounding.
        """
        geometry, rope = self.geometry(transformer), transformer.rope
        bases = (rope.base_num_frames, rope.base_height, rope.base_width) if scale is not None else (1, 1, 1)
        factors = scale or (1, 1, 1)
        patch = geometry.patch_size if scale is not None else (1, 1, 1)
        return LTXRope(
            heads=geometry.num_heads,
            head_dim=geometry.head_dim,
            bases=bases,
            theta=rope.theta,
            coordinates=lambda index, axis: index * factors[axis] * patch[axis],
            dtype=dtype,
            frequency_dtype=dtype,
        )


class LTX2Family(TransformerFamily):
    """The video stream of LTX-2."""

    name = "ltx2"
    parts = ("transformer_blocks", "rope", "proj_in", "audio_proj_in", "audio_rope", "time_embed", "config")
    absent = ("build_rotary_emb_for_absolute_positions",)  # the refiner of SANA-WM, which keeps keys of its own
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn1", parts=(*_ATTN_PARTS, "rope_type")),)
    checks_calls = True

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        config = transformer.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a block's ``attn1``."""
        return PagedLTX2Processor(attn.processor)

    def make_rope(self, transformer: Any, *, fps: float = 24.0, dtype: torch.dtype = torch.float64) -> RopeFunction:
        """Angles of tokens at absolute frames.

        Args:
            transformer: a model of the family.
            fps: frames a second of the pixels.
            dtype: of the angles; float32 gives the host's own rounding.
        """
        geometry, rope = self.geometry(transformer), transformer.rope

        def coordinates(index: torch.Tensor, axis: int) -> torch.Tensor:
            size, scale = geometry.patch_size[axis], rope.scale_factors[axis]
            edges = [index * size * scale, (index * size + size) * scale]
            if axis == 0:
                # The first latent frame holds one picture, the others ``scale``.
                edges = [(edge + rope.causal_offset - scale).clamp(min=0) / fps for edge in edges]
            return (edges[0] + edges[1]) / 2

        return LTXRope(
            heads=geometry.num_heads,
            head_dim=geometry.head_dim,
            bases=(rope.base_num_frames, rope.base_height, rope.base_width),
            theta=rope.theta,
            coordinates=coordinates,
            halves=rope.rope_type == "split",
            dtype=dtype,
            frequency_dtype=torch.float64 if rope.double_precision else dtype,
        )

    def check_call(self, transformer: Any, call: Mapping[str, Any], context: Any) -> None:
        """Audio must be kept apart: it is not in the cache, and would see and show one chunk of video only."""
        if not call.get("isolate_modalities", False):
            raise ValueError(
                "the cache holds LTX-2's video stream only; audio that sees one chunk of it would not be that of the whole "
                "video, and would change the video. Call the transformer with isolate_modalities=True."
            )


register_family(LTXFamily())
register_family(LTX2Family())
