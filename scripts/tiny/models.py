"""The untrained components (stock diffusers and transformers classes) and helpers to run them in training."""

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from transformers import UMT5Config, UMT5EncoderModel

from .captions import vocabulary

LATENT_CHANNELS = 16
TEXT_DIM = 64
SHIFT = 3.0
APART_SHARE = 0.6


def build_vae() -> AutoencoderKLWan:
    """2.6 M parameters; four pixel frames (after a first single one) and 8x8 pixels a latent cell."""
    return AutoencoderKLWan(base_dim=16, z_dim=LATENT_CHANNELS, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


def build_transformer() -> WanTransformer3DModel:
    """4.9 M parameters; 16 tokens a latent frame of 8x8 cells."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=48,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=704,
        num_layers=8,
    )


def build_text_encoder() -> UMT5EncoderModel:
    """Two layers over the word-level vocabulary of `captions`."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(vocabulary()),
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with the shift the transformer is trained with."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


def encode_text(text_encoder: UMT5EncoderModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Wan's rule for (B, T) token ids: rows after the true length are exactly zero, and no mask is kept: (B, T, D)."""
    mask = token_ids != 0
    hidden = text_encoder(token_ids, attention_mask=mask.long()).last_hidden_state
    return hidden * mask[..., None]


def encode_apart(text_encoder: UMT5EncoderModel, token_ids: torch.Tensor, color_words: torch.Tensor) -> torch.Tensor:
    """Text states (B, T, D) of which, in a share of `APART_SHARE` of the captions, no word tells another word's secret.

    There colour words come from the caption with other kinds, all others from the caption with other colours. So the
    colour has to be read from the colour word and the kind from the word for it, for pairs never seen together, too.

    Args:
        text_encoder: of the words.
        token_ids: (B, 3, T): the caption, the same with other colours, the same with other kinds.
        color_words: (vocabulary,) bool.
    """
    own, other_colors, other_kinds = encode_text(text_encoder, token_ids.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    is_color = color_words[token_ids[:, 0]][..., None]
    apart = torch.rand(len(own), 1, 1, device=own.device) < APART_SHARE
    return torch.where(apart, torch.where(is_color, other_kinds, other_colors), own)


def encode_video(vae: AutoencoderKLWan, video: torch.Tensor) -> DiagonalGaussianDistribution:
    """Posterior of a video (B, 3, 1 + 4n, H, W) over (B, 16, 1 + n, H/8, W/8).

    The same result as `vae.encode`, in two causal encoder calls (the first frame, all others) instead of 1 + n.
    """
    cache: list[torch.Tensor | None] = [None] * vae._cached_conv_counts["encoder"]
    first = vae.encoder(video[:, :, :1], feat_cache=cache, feat_idx=[0])
    rest = vae.encoder(video[:, :, 1:], feat_cache=cache, feat_idx=[0])
    return DiagonalGaussianDistribution(vae.quant_conv(torch.cat([first, rest], dim=2)))


def decode_video(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Video of raw (not normalised) latents, the inverse of `encode_video`; values are not clamped."""
    cache: list[torch.Tensor | None] = [None] * vae._cached_conv_counts["decoder"]
    hidden = vae.post_quant_conv(latents)
    first = vae.decoder(hidden[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)
    rest = vae.decoder(hidden[:, :, 1:], feat_cache=cache, feat_idx=[0])
    return torch.cat([first, rest], dim=2)


def latent_stats(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation baked into the VAE's config, each (1, 16, 1, 1, 1)."""
    device = next(vae.parameters()).device
    mean, std = (torch.tensor(values, device=device) for values in (vae.config.latents_mean, vae.config.latents_std))
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
