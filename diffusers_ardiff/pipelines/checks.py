"""Checks of a call against the models of the pipeline, before anything is encoded or allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..processors import find_family
from ..recipes import Recipe
from .inputs import CallArguments

if TYPE_CHECKING:
    from .host import PipelineHost


def check_components(pipeline: PipelineHost, arguments: CallArguments, *, guided: bool) -> None:
    """Raise ValueError where the call needs a component that the pipeline was made without, or another transformer."""
    a = arguments
    has_text = a.prompt is not None or (guided and a.negative_prompt_embeds is None)
    has_text = has_text or any(switch.prompt is not None for switch in a.prompt_schedule)
    needed = {
        "transformer": True,
        "tokenizer": has_text,
        "text_encoder": has_text,
        "vae": (a.output_type != "latent" and pipeline.decoding.light is None)
        or a.image is not None
        or a.video is not None,
    }
    missing = [name for name, is_needed in needed.items() if is_needed and getattr(pipeline, name) is None]
    if missing:
        raise ValueError(
            f"this call needs {missing}, which the pipeline was made without. Without a text encoder give "
            "`prompt_embeds` (and `negative_prompt_embeds`, and those of each prompt switch); without a VAE take "
            "output_type='latent' or a light decoder (`set_decoder`), and give `context_latents`."
        )
    check_family(pipeline.transformer)


def check_family(transformer: Any) -> None:
    """Raise ValueError for a transformer that can be attached but not called as the pipeline calls it."""
    if find_family(transformer).name != "wan" or getattr(transformer, "vace_blocks", None) is not None:
        raise ValueError(
            f"{type(transformer).__name__} takes other inputs than the pipeline prepares, which are those of Wan "
            "text-to-video models. Paged attention itself works: write the loop as docs/families.md shows."
        )


def check_models(pipeline: PipelineHost) -> None:
    """Raise ValueError for a transformer that can't be sampled chunk by chunk, or that does not go with the VAE."""
    check_family(pipeline.transformer)
    config = pipeline.transformer.config
    in_channels, out_channels, patch = config["in_channels"], config["out_channels"], config["patch_size"]
    if in_channels != out_channels:
        raise ValueError(
            f"a transformer with {in_channels} input and {out_channels} output channels (an image-to-video model) is "
            "not supported. Take a text-to-video model; it continues an image given as `image`."
        )
    if patch[0] != 1:
        raise ValueError(
            f"a transformer whose patches span {patch[0]} latent frames is not supported; the patch must be 1 frame."
        )
    z_dim = in_channels if pipeline.vae is None else pipeline.vae.config["z_dim"]
    if z_dim != in_channels:
        raise ValueError(
            f"the transformer has {in_channels} latent channels and the VAE {z_dim}; they are not of one model."
        )


def check_first_frame(pipeline: PipelineHost, recipe: Recipe) -> None:
    """Raise ValueError where a recipe that encodes decoded frames again can't have them before its next chunk."""
    if not recipe.encode_first_frame:
        return
    hindrances = {
        "the pipeline has no VAE": pipeline.vae is None,
        "set_decoder(overlap=True) decodes beside the next chunk": pipeline.decoding.options.overlap,
        "decode_rank=True decodes on another rank": pipeline.parallel_layout.decode_rank,
    }
    reasons = [reason for reason, applies in hindrances.items() if applies]
    if reasons:
        raise ValueError(
            f"recipe {recipe.name!r} encodes decoded frames for the context of its next chunk (encode_first_frame=True), and "
            f"{'; '.join(reasons)}. Change that, or give encode_first_frame=False: the context then keeps the video's first "
            "latent frame."
        )


def check_embeds(arguments: CallArguments, text_dim: int) -> None:
    """Raise ValueError for prompt embeddings, those of prompt switches included, of another width than the model's."""
    given = {
        "prompt_embeds": arguments.prompt_embeds,
        "negative_prompt_embeds": arguments.negative_prompt_embeds,
        **{
            f"prompt_embeds of the prompt switch at latent frame {switch.latent_frame}": switch.prompt_embeds
            for switch in arguments.prompt_schedule
        },
    }
    for name, embeds in given.items():
        if embeds is not None and embeds.shape[-1] != text_dim:
            raise ValueError(
                f"`{name}` must be (prompts, text_len, {text_dim}) for this transformer, got {tuple(embeds.shape)}."
            )


def check_given_latents(latents: torch.Tensor | None, num_videos: int, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless given latents are (1 or videos, *expected)."""
    if latents is not None and (tuple(latents.shape[1:]) != expected or num_videos % latents.shape[0]):
        raise ValueError(
            f"given latents must be (1 or {num_videos}, {', '.join(map(str, expected))}), got {tuple(latents.shape)}."
        )


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """Where a stream's models run and in which dtype; its keys, text and decoder state are of the same.

    Args:
        device: that runs the models, offloaded or not.
        transformer_dtype, vae_dtype: of their weights; None: nothing is decoded by the VAE.
    """

    device: torch.device
    transformer_dtype: torch.dtype
    vae_dtype: torch.dtype | None

    @classmethod
    def of(cls, pipeline: PipelineHost, *, decodes: bool) -> ModelPlace:
        """As it is now."""
        uses_vae = decodes and pipeline.vae is not None and pipeline.decoding.light is None
        return cls(
            device=pipeline._execution_device,
            transformer_dtype=pipeline.transformer.dtype,
            vae_dtype=pipeline.vae.dtype if uses_vae else None,
        )

    def check(self, pipeline: PipelineHost) -> None:
        """Raise RuntimeError where the models were moved or cast."""
        now = ModelPlace.of(pipeline, decodes=self.vae_dtype is not None)
        if now != self:
            raise RuntimeError(
                f"the pipeline was moved or cast since this stream began: from {self} to {now}. What the stream "
                "remembers stays as it was, so put the models back, or start a new stream."
            )

    def __str__(self) -> str:
        vae = "" if self.vae_dtype is None else f", VAE {self.vae_dtype}"
        return f"{self.device} (transformer {self.transformer_dtype}{vae})"
