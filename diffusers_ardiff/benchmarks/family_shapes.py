"""Transformers of each family at the sizes of a published model, and what a call of them takes. Weights are random.

An input function takes the transformer and a ``Chunk`` and returns the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import diffusers
import torch

Arguments = Mapping[str, Any]
IMAGE_TOKENS = 257
"""What CLIP makes of the picture that image-to-video models of Wan see beside the prompt."""


class Chunk(NamedTuple):
    """What a call is about.

    Attributes:
        latents: (1, channels, frames, height, width).
        first: absolute frame of the first one.
        text_len: rows of the prompt.
        place: ``place(*size)`` is a random tensor of the model's dtype, on its device.
    """

    latents: torch.Tensor
    first: int
    text_len: int
    place: Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class FamilyShape:
    """One model of real size.

    Attributes:
        model: class in diffusers.
        config: what differs from the class's defaults; ``tiny``: what differs from that on a CPU.
        shorten: what a model of so many blocks has in its config.
        height, width: of a frame, in latents; ``tiny_size`` on a CPU.
        inputs: makes the arguments of a call.
        text_rows: of joint attention, all of them no padding; 0: the family has none.
        text_len: rows of the prompt.
        reference: whether every forward begins with a picture's frame, as extra rows.
        rope: options of ``make_rope``.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    shorten: Callable[[int], dict[str, Any]] = lambda layers: {"num_layers": layers}
    height: int
    width: int
    tiny_size: tuple[int, int] = (4, 6)
    inputs: Callable[[Any, Chunk], Arguments]
    text_len: int
    text_rows: int = 0
    reference: bool = False
    rope: dict[str, Any] = field(default_factory=dict)

    def build(self, *, tiny: bool, layers: int | None = None) -> Any:
        """The transformer, on torch's default device and in its default dtype; ``layers``: with so many blocks only."""
        config = {**self.config, **(self.tiny if tiny else {})}
        if layers is not None:
            config |= self.shorten(layers)
        return getattr(diffusers, self.model)(**config).eval().requires_grad_(False)

    def size(self, *, tiny: bool) -> tuple[int, int]:
        """Height and width of a frame, in latents."""
        return self.tiny_size if tiny else (self.height, self.width)


def _times(latents: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), 500.0, device=latents.device)


def _wan(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    config = transformer.config
    arguments: dict[str, Any] = {
        "hidden_states": latents,
        "timestep": _times(latents),
        "encoder_hidden_states": place(1, text_len, config.text_dim),
    }
    if config.get("added_kv_proj_dim") is not None:
        arguments["encoder_hidden_states_image"] = place(1, IMAGE_TOKENS, config.image_dim)
    if hasattr(config, "vace_in_channels"):
        arguments["control_hidden_states"] = place(1, config.vace_in_channels, *latents.shape[2:])
    return arguments


def _wan_animate(transformer: Any, chunk: Chunk) -> Arguments:
    config, (_, _, frames, height, width) = transformer.config, chunk.latents.shape
    picture = chunk.place(1, config.in_channels, 1, height, width)
    face, begin = config.motion_encoder_size, 4 * max(chunk.first - 2, 0)
    num_faces = 4 * (chunk.first + frames - 1) + 1 - begin
    return {
        **_wan(transformer, chunk),
        "hidden_states": torch.cat([picture, chunk.latents], dim=2),
        "pose_hidden_states": chunk.place(1, config.latent_channels, frames, height, width),
        "face_pixel_values": chunk.place(1, 3, num_faces, face, face),
    }


def _ltx(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    text = place(1, text_len, transformer.config.caption_channels)
    frames, height, width = latents.shape[2:]
    arguments = {
        "hidden_states": latents.flatten(2).transpose(1, 2),
        "encoder_hidden_states": text,
        "timestep": _times(latents)[None],
        "encoder_attention_mask": None,
        "num_frames": frames,
        "height": height,
        "width": width,
    }
    if not hasattr(transformer, "audio_proj_in"):
        return {**arguments, "rope_interpolation_scale": (8 / 24, 32.0, 32.0)}
    audio = {"audio_hidden_states": place(1, 8, transformer.config.audio_in_channels), "audio_num_frames": 8}
    texts = {"audio_encoder_hidden_states": text, "sigma": _times(latents), "isolate_modalities": True}
    return {**arguments, **audio, **texts}


def _cosmos(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    text = place(1, text_len, transformer.config.text_embed_dim)
    return {"hidden_states": latents, "timestep": _times(latents), "encoder_hidden_states": text, "fps": 16}


def _cogvideox(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    grid = (latents.shape[3] // 2, latents.shape[4] // 2)
    rotary = diffusers.models.embeddings.get_3d_rotary_pos_embed(
        transformer.config.attention_head_dim, ((0, 0), grid), grid, latents.shape[2], device=latents.device
    )
    return {
        "hidden_states": latents.transpose(1, 2),
        "encoder_hidden_states": place(1, text_len, transformer.config.text_embed_dim),
        "timestep": _times(latents),
        "image_rotary_emb": rotary,
    }


def _hunyuan(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    config = transformer.config
    arguments: dict[str, Any] = {
        "hidden_states": latents,
        "timestep": _times(latents).to(latents.dtype),
        "encoder_hidden_states": place(1, text_len, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, text_len, device=latents.device, dtype=torch.long),
    }
    if hasattr(transformer, "time_text_embed"):
        return {
            **arguments,
            "pooled_projections": place(1, config.pooled_projection_dim),
            "guidance": torch.full((1,), 6000.0, device=latents.device, dtype=latents.dtype),
        }
    return {
        **arguments,
        "encoder_hidden_states_2": place(1, 0, config.text_embed_2_dim),
        "encoder_attention_mask_2": torch.ones(1, 0, device=latents.device, dtype=torch.long),
        "image_embeds": torch.zeros(1, 0, config.image_embed_dim, device=latents.device, dtype=latents.dtype),
    }


def _kandinsky(transformer: Any, chunk: Chunk) -> Arguments:
    latents, text_len, place = chunk.latents, chunk.text_len, chunk.place
    frames, height, width = latents.shape[2:]
    axes = (frames, height // 2, width // 2)
    return {
        "hidden_states": latents.permute(0, 2, 3, 4, 1),
        "encoder_hidden_states": place(1, text_len, transformer.config.in_text_dim),
        "timestep": _times(latents),
        "pooled_projections": place(1, transformer.config.in_text_dim2),
        "visual_rope_pos": tuple(torch.arange(n, device=latents.device) for n in axes),
        "text_rope_pos": torch.arange(text_len, device=latents.device),
    }


def _shorten_vace(layers: int) -> dict[str, Any]:
    return {"num_layers": layers, "vace_layers": list(range(0, layers, 2))}


def _shorten_animate(layers: int) -> dict[str, Any]:
    """A multiple of ten, since the faces come in at every fifth."""
    return {"num_layers": max(10, layers // 10 * 10)}


def _shorten_hunyuan(layers: int) -> dict[str, Any]:
    """One third of them joint, as in the whole model."""
    joint = max(1, layers // 3)
    return {"num_layers": joint, "num_single_layers": max(1, layers - joint)}


_TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_TINY_WAN = {**_TINY_HEADS, "ffn_dim": 32, "text_dim": 8, "freq_dim": 16}
_WAN_1_3B = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960, "cross_attn_norm": True}
_LTX2_TINY = {
    **_TINY_HEADS, "cross_attention_dim": 32, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16, "caption_channels": 8, "in_channels": 4, "out_channels": 4,
}  # fmt: skip

FAMILY_SHAPES: dict[str, FamilyShape] = {
    "wan": FamilyShape(
        model="WanTransformer3DModel", config=_WAN_1_3B, tiny=_TINY_WAN, height=60, width=104, inputs=_wan, text_len=512
    ),
    "skyreels-v2": FamilyShape(
        model="SkyReelsV2Transformer3DModel",
        config=_WAN_1_3B,
        tiny=_TINY_WAN,
        height=68,
        width=120,
        inputs=_wan,
        text_len=512,
    ),
    "wan-vace": FamilyShape(
        model="WanVACETransformer3DModel",
        config={**_WAN_1_3B, "vace_layers": list(range(0, 30, 2))},
        tiny={**_TINY_WAN, "vace_layers": [0]},
        shorten=_shorten_vace,
        height=60,
        width=104,
        inputs=_wan,
        text_len=512,
    ),
    "wan-animate": FamilyShape(
        model="WanAnimateTransformer3DModel",
        config={"image_dim": 1280, "added_kv_proj_dim": 5120},
        shorten=_shorten_animate,
        tiny={
            **_TINY_WAN, "latent_channels": 4, "in_channels": 12, "out_channels": 4, "image_dim": 8,
            "added_kv_proj_dim": 32, "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4,
            "motion_encoder_dim": 16, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        },
        height=60,
        width=104,
        inputs=_wan_animate,
        text_len=512,
        reference=True,
    ),
    "chronoedit": FamilyShape(
        model="ChronoEditTransformer3DModel",
        config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        tiny={**_TINY_WAN, "image_dim": 8, "added_kv_proj_dim": 32},
        height=60,
        width=104,
        inputs=_wan,
        text_len=512,
    ),
    "ltx": FamilyShape(
        model="LTXVideoTransformer3DModel",
        tiny={**_TINY_HEADS, "cross_attention_dim": 32, "caption_channels": 8, "in_channels": 4, "out_channels": 4},
        height=22,
        width=38,
        inputs=_ltx,
        text_len=128,
        rope={"scale": (8 / 24, 32.0, 32.0)},
    ),
    "ltx2": FamilyShape(
        model="LTX2VideoTransformer3DModel", tiny=_LTX2_TINY, height=22, width=38, inputs=_ltx, text_len=1024
    ),
    "cosmos": FamilyShape(
        model="CosmosTransformer3DModel",
        config={
            "in_channels": 18, "num_attention_heads": 16, "rope_scale": (1.0, 3.0, 3.0), "extra_pos_embed_type": None,
            "concat_padding_mask": False,
        },
        tiny={**_TINY_HEADS, "text_embed_dim": 8, "adaln_lora_dim": 4},
        height=88,
        width=160,
        inputs=_cosmos,
        text_len=512,
        rope={"fps": 16},
    ),
    "cogvideox": FamilyShape(
        model="CogVideoXTransformer3DModel",
        config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        tiny={**_TINY_HEADS, "text_embed_dim": 8, "time_embed_dim": 8},
        height=60,
        width=90,
        inputs=_cogvideox,
        text_len=226,
        text_rows=226,
    ),
    "hunyuan-video": FamilyShape(
        model="HunyuanVideoTransformer3DModel",
        shorten=_shorten_hunyuan,
        tiny={**_TINY_HEADS, "num_single_layers": 2, "text_embed_dim": 8, "rope_axes_dim": (4, 6, 6)},
        height=68,
        width=120,
        inputs=_hunyuan,
        text_len=256,
        text_rows=256,
    ),
    "hunyuan-video-1.5": FamilyShape(
        model="HunyuanVideo15Transformer3DModel",
        tiny={**_TINY_HEADS, "text_embed_dim": 8, "rope_axes_dim": (4, 6, 6)},
        height=30,
        width=52,
        inputs=_hunyuan,
        text_len=256,
        text_rows=256,
    ),
    "kandinsky5": FamilyShape(
        model="Kandinsky5Transformer3DModel",
        config={"in_visual_dim": 33, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168},
        shorten=lambda layers: {"num_visual_blocks": layers},
        tiny={
            "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 8, "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1,
            "num_visual_blocks": 2, "axes_dims": (4, 6, 6),
        },
        height=64,
        width=96,
        inputs=_kandinsky,
        text_len=256,
    ),
}  # fmt: skip
