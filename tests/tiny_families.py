"""Tiny random models of every family, a paged run of each, and the stock model under a mask to compare with.

Frames are 4 x 6 latents in patches of 1 or 2, so C = 24 or 6 tokens, which no page of 16 divides into.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    CogVideoXTransformer3DModel,
    CosmosTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    Kandinsky5Transformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from rollouts import make_manager
from tiny_wan import TINY as TINY_WAN

from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import PagedAttachment, attach_paged_attention

CHANNELS, HEIGHT, WIDTH, TEXT_DIM, TEXT_LEN = 4, 4, 6, 8, 5


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def times(value: float) -> torch.Tensor:
    return torch.full((1,), float(value))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model and how it is called.

    Attributes:
        model: its class; ``config``: of a tiny one.
        call: (transformer, latents (1, channels, frames, height, width), timestep) -> (1, tokens or frames ..., ...),
            whose dimension ``frame_dim`` is proportional to the frames.
        text: rows of joint attention that are text, and whether they come first; ``padding``: more of them, last, that
            nobody may see.
        patch: (frames, height, width).
        graphs: for all layers: one a class of blocks, and one more where the host gives the first block of a class other
            parts (VACE) or other strides (joint models) than the next.
    """

    model: type
    config: dict[str, Any]
    call: Callable[[Any, torch.Tensor, float], torch.Tensor]
    frame_dim: int = 2
    text: int = 0
    text_first: bool = False
    padding: int = 0
    patch: tuple[int, int, int] = (1, 2, 2)
    graphs: int = 1
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """C."""
        return HEIGHT // self.patch[1] * (WIDTH // self.patch[2])

    def make(self, **changes: Any) -> Any:
        """Random weights, all of them: layers initialised to one or zero would hide a part that is not applied."""
        torch.manual_seed(0)
        transformer = self.model(**{**self.config, **changes}).eval().requires_grad_(False)
        for parameter in transformer.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
        return transformer

    def latents(self, frames: int, seed: int) -> torch.Tensor:
        """(1, channels, frames, height, width), ``frames`` counted in patches."""
        return noise(1, CHANNELS, frames * self.patch[0], HEIGHT, WIDTH, seed=seed)

    def run(self, transformer: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
        with torch.no_grad():
            return self.call(transformer, latents, timestep)

    def attns(self, transformer: Any) -> list[Any]:
        """Modules of self- or joint attention over video."""
        names = ("attn1", "self_attention", "attn")
        stacks = (
            "blocks",
            "vace_blocks",
            "transformer_blocks",
            "single_transformer_blocks",
            "visual_transformer_blocks",
        )
        blocks = [block for stack in stacks for block in getattr(transformer, stack, [])]
        return [next(getattr(block, name) for name in names if hasattr(block, name)) for block in blocks]

    def masked_copy(self, transformer: Any, mask: torch.Tensor) -> Any:
        """The stock transformer under a (tokens, tokens) mask of its video; text sees text only, video sees all text."""
        total, text = len(mask), self.text
        joint = torch.zeros(total + text + self.padding, total + text + self.padding, dtype=torch.bool)
        video = slice(text, None) if self.text_first else slice(0, total)
        words = slice(0, text) if self.text_first else slice(total, total + text)
        joint[video, video], joint[:, words] = mask, True
        twin = copy.deepcopy(transformer)
        for attn in self.attns(twin):
            attn.set_processor(masked_processor(attn.processor, joint))
        return twin


def masked_processor(host: Any, mask: torch.Tensor) -> Any:
    """A stock processor, in which torch's attention is given a mask in place of the processor's own."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask=None, **kwargs: Any):
        assert query.shape[2] == key.shape[2] == len(mask)
        return attention(query, key, value, attn_mask=mask, **kwargs)

    class Masked(type(host)):
        @functools.wraps(type(host).__call__)
        def __call__(self, *args: Any, **kwargs: Any):
            with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", masked):
                return super().__call__(*args, **kwargs)

    return Masked()


def window_mask(chunks: Sequence[int], sink: int, window: int, tokens: int) -> torch.Tensor:
    """(tokens, tokens) bool: a chunk sees the first ``sink`` frames and the last ``window`` up to its own end."""
    total, end = sum(chunks), 0
    mask = torch.zeros(total, total, dtype=torch.bool)
    for length in chunks:
        begin, end = end, end + length
        mask[begin:end, :sink] = True
        mask[begin:end, max(end - window, 0) : end] = True
        mask[begin:end, end:] = False
    return mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


class FamilyRun:
    """Chunks through a transformer with paged processors; lengths in frames."""

    def __init__(self, family: Family, transformer: Any, sink: int, window: int, **kwargs: Any) -> None:
        self.family, self.transformer = family, transformer
        self.paged: PagedAttachment = attach_paged_attention(transformer)
        geometry, tokens = self.paged.geometry, family.tokens
        assert geometry.tokens_per_frame(HEIGHT, WIDTH) == tokens
        sizes = {"layers": geometry.num_layers, "heads": geometry.num_heads, "head_dim": geometry.head_dim}
        self.manager = make_manager(tokens * sink, tokens * window, extra=family.text, **(sizes | kwargs))
        self.branch = self.manager.open_session().branch()
        self.rope = self.paged.make_rope(**family.rope)

    def forward(self, latents: torch.Tensor, timestep: float, *, commit: bool = True) -> torch.Tensor:
        """One forward."""
        frames = latents.shape[2] // self.family.patch[0]
        first = self.branch.committed_tokens // self.family.tokens
        grid = (HEIGHT // self.family.patch[1], WIDTH // self.family.patch[2])
        rotary = self.rope([list(range(first, first + frames))], *grid, "cpu")
        context = PagedForwardContext(
            [self.branch], num_tokens=self.family.tokens * frames, num_extra=self.family.text
        )
        with context, self.paged.bind(context, rotary):
            out = self.family.run(self.transformer, latents, timestep)
        if commit:
            context.mark_committed()
        return out


# -- the models -----------------------------------------------------------------------------------------------------


def call_wan(transformer: Any, latents: torch.Tensor, timestep: float, **kwargs: Any) -> torch.Tensor:
    return transformer(latents, times(timestep), noise(1, TEXT_LEN, TEXT_DIM), return_dict=False, **kwargs)[0]


def call_vace(transformer: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
    return call_wan(transformer, latents, timestep, control_hidden_states=latents.flip(3))


def pack(latents: torch.Tensor) -> torch.Tensor:
    return latents.flatten(2).transpose(1, 2)


LTX_SCALE = (8 / 24, 32.0, 32.0)


def call_ltx(transformer: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
    return transformer(
        pack(latents), noise(1, TEXT_LEN, TEXT_DIM), times(timestep)[None],
        torch.tensor([[1, 1, 1, 0, 0]]), *latents.shape[2:], LTX_SCALE, return_dict=False,
    )[0]  # fmt: skip


def call_ltx2(transformer: Any, latents: torch.Tensor, timestep: float, **kwargs: Any) -> torch.Tensor:
    text = noise(1, TEXT_LEN, transformer.config.caption_channels)
    frames, height, width = latents.shape[2:]
    return transformer(
        pack(latents), noise(1, 3, CHANNELS, seed=9), text, text, times(timestep)[None], sigma=times(timestep),
        num_frames=frames, height=height, width=width, fps=16.0, audio_num_frames=3, return_dict=False,
        **{"isolate_modalities": True, **kwargs},
    )[0]  # fmt: skip


def call_cosmos(transformer: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
    return transformer(
        latents, times(timestep), noise(1, TEXT_LEN, TEXT_DIM), fps=16, return_dict=False
    )[0]  # fmt: skip


def cog_rotary(transformer: Any, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The host's own angles of a video from its first frame on; not read while a forward is bound."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid = (HEIGHT // 2, WIDTH // 2)
    return get_3d_rotary_pos_embed(
        transformer.config.attention_head_dim, ((0, 0), grid), grid, frames // (transformer.config.patch_size_t or 1)
    )


def call_cog(transformer: Any, latents: torch.Tensor, timestep: float) -> torch.Tensor:
    rotary = cog_rotary(transformer, latents.shape[2])
    return transformer(
        latents.transpose(1, 2), noise(1, TEXT_LEN, TEXT_DIM), times(timestep), image_rotary_emb=rotary,
        return_dict=False,
    )[0]  # fmt: skip


def call_hunyuan(transformer: Any, latents: torch.Tensor, timestep: float, valid: int = 3) -> torch.Tensor:
    mask = (torch.arange(TEXT_LEN) < valid).long()[None]
    return transformer(
        latents, times(timestep), noise(1, TEXT_LEN, TEXT_DIM), mask, noise(1, 6), guidance=times(6000.0),
        return_dict=False,
    )[0]  # fmt: skip


def call_hunyuan15(transformer: Any, latents: torch.Tensor, timestep: float, valid: int = 3) -> torch.Tensor:
    masks = [(torch.arange(length) < count).long()[None] for length, count in ((TEXT_LEN, valid), (4, 2))]
    return transformer(
        latents, times(timestep), noise(1, TEXT_LEN, TEXT_DIM), masks[0],
        encoder_hidden_states_2=noise(1, 4, TEXT_DIM, seed=4), encoder_attention_mask_2=masks[1],
        image_embeds=torch.zeros(1, 3, TEXT_DIM), return_dict=False,
    )[0]  # fmt: skip


def call_kandinsky(transformer: Any, latents: torch.Tensor, timestep: float, **kwargs: Any) -> torch.Tensor:
    frames, height, width = latents.shape[2], HEIGHT // 2, WIDTH // 2
    positions = tuple(torch.arange(n) for n in (frames, height, width))
    return transformer(
        latents.permute(0, 2, 3, 4, 1), noise(1, TEXT_LEN, TEXT_DIM), times(timestep), noise(1, 6),
        positions, torch.arange(TEXT_LEN), return_dict=False, **kwargs,
    )  # fmt: skip


LTX2 = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 2, "attention_head_dim": 10,
    "cross_attention_dim": 20, "audio_in_channels": CHANNELS, "audio_out_channels": CHANNELS,
    "audio_num_attention_heads": 2, "audio_attention_head_dim": 6, "audio_cross_attention_dim": 12, "num_layers": 2,
    "caption_channels": TEXT_DIM,
}  # fmt: skip
HUNYUAN = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 2, "attention_head_dim": 12,
    "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": TEXT_DIM, "rope_axes_dim": (4, 4, 4),
}  # fmt: skip
COG = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "time_embed_dim": 8, "text_embed_dim": TEXT_DIM, "num_layers": 2, "sample_width": WIDTH, "sample_height": HEIGHT,
    "max_text_seq_length": TEXT_LEN, "use_rotary_positional_embeddings": True,
}  # fmt: skip

FAMILIES = {
    "wan": Family(model=WanTransformer3DModel, config=TINY_WAN, call=call_wan),
    "skyreels-v2": Family(model=SkyReelsV2Transformer3DModel, config=TINY_WAN, call=call_wan),
    "chronoedit": Family(model=ChronoEditTransformer3DModel, config=TINY_WAN, call=call_wan),
    "wan-vace": Family(
        model=WanVACETransformer3DModel,
        config={**TINY_WAN, "vace_layers": [0, 1], "vace_in_channels": CHANNELS},
        call=call_vace,
        graphs=3,
    ),
    "ltx": Family(
        model=LTXVideoTransformer3DModel,
        config={
            "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 2, "attention_head_dim": 10,
            "cross_attention_dim": 20, "num_layers": 2, "caption_channels": TEXT_DIM,
        },
        call=call_ltx,
        frame_dim=1,
        patch=(1, 1, 1),
        rope={"scale": LTX_SCALE, "dtype": torch.float32},
    ),
    "ltx2": Family(
        model=LTX2VideoTransformer3DModel,
        config=LTX2,
        call=call_ltx2,
        frame_dim=1,
        patch=(1, 1, 1),
        rope={"fps": 16.0, "dtype": torch.float32},
    ),
    "ltx2-split": Family(
        model=LTX2VideoTransformer3DModel,
        config={
            **LTX2, "rope_type": "split", "rope_double_precision": False, "gated_attn": True, "audio_gated_attn": True,
            "perturbed_attn": True,
        },
        call=call_ltx2,
        frame_dim=1,
        patch=(1, 1, 1),
        rope={"fps": 16.0, "dtype": torch.float32},
    ),
    "cosmos": Family(
        model=CosmosTransformer3DModel,
        config={
            "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 2, "attention_head_dim": 16,
            "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": TEXT_DIM, "adaln_lora_dim": 4, "max_size": (32, 32, 32),
            "extra_pos_embed_type": None, "concat_padding_mask": False,
        },
        call=call_cosmos,
        rope={"fps": 16},
    ),
    "cogvideox": Family(
        model=CogVideoXTransformer3DModel,
        config=COG,
        call=call_cog,
        frame_dim=1,
        text=TEXT_LEN,
        text_first=True,
        graphs=2,
    ),
    "cogvideox-1.5": Family(
        model=CogVideoXTransformer3DModel,
        config={**COG, "patch_size_t": 2, "patch_bias": False, "attention_bias": True},
        call=call_cog,
        frame_dim=1,
        text=TEXT_LEN,
        text_first=True,
        patch=(2, 2, 2),
        graphs=2,
    ),
    "hunyuan-video": Family(
        model=HunyuanVideoTransformer3DModel,
        config={**HUNYUAN, "num_single_layers": 2, "pooled_projection_dim": 6},
        call=call_hunyuan,
        text=3,
        padding=2,
        graphs=3,
    ),
    "hunyuan-video-1.5": Family(
        model=HunyuanVideo15Transformer3DModel,
        config={**HUNYUAN, "patch_size": 2, "text_embed_2_dim": TEXT_DIM, "image_embed_dim": TEXT_DIM},
        call=call_hunyuan15,
        text=5,
        padding=7,
    ),
    "kandinsky5": Family(
        model=Kandinsky5Transformer3DModel,
        config={
            "in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS, "in_text_dim": TEXT_DIM, "in_text_dim2": 6,
            "time_dim": 8, "model_dim": 24, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
        },
        call=call_kandinsky,
        frame_dim=1,
    ),
}  # fmt: skip
