"""Which decoder makes the frames, and how it runs: the pipeline's VAE or a light decoder, plain or prepared for speed."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .decode_step import CompiledLightStep, CompiledStep, decode_step, set_conv_layout
from .decode_stream import DecodeStream
from .light_decoder import LightDecoder
from .light_stream import LightDecodeStream, light_state_bytes
from .overlap import decode_lane
from .vae_stream import VaeDecodeStream, decode_state_bytes
from .work_memory import light_decode_bytes, vae_decode_bytes

if TYPE_CHECKING:
    from ..recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How a decoder runs. The defaults change nothing about it.

    Args:
        compile: with ``torch.compile``, for exact shapes: another chunk length, size or batch compiles again
            (``warmup_decoder`` does it ahead). Agrees with the plain decoder to float rounding.
        channels_last: convolution weights channels-last, in place (values stay, bit by bit); what a GPU's convolution
            kernels want. Agrees to float rounding.
        overlap: on a CUDA stream of its own, beside the denoising of the next chunk. Same bits. A chunk is handed out
            while its frames are still being made, and reading ``chunk.frames`` waits for them: on the device for
            output type "pt", on the host for "np" and "pil". Needs a CUDA device and models that stay on it.
    """

    compile: bool = False
    channels_last: bool = False
    overlap: bool = False


class Decoding:
    """One decoder with its options; keeps compiled code from stream to stream.

    Args:
        vae: the pipeline's VAE; None where it has none.
        light: decodes in its place; None: the VAE does.
        options: how.
        compiler: backend of ``torch.compile``.
    """

    def __init__(
        self, vae: Any, light: LightDecoder | None, options: DecodeOptions, *, compiler: Any = "inductor"
    ) -> None:
        self.vae = vae
        self.light = light
        self.options = options
        compiled = {"channels_last": options.channels_last, "compiler": compiler}
        self._vae_step = CompiledStep(**compiled) if options.compile else decode_step
        self._light_step = CompiledLightStep(light, **compiled) if options.compile and light is not None else None

    def check(self, device: torch.device, batch: int) -> None:
        """Raise where ``batch`` rows can't be decoded with these options on ``device``.

        Raises:
            ValueError: overlap without a CUDA device.
            NotImplementedError: the VAE's own options, or offloading, forbid it.
        """
        if self.options.overlap and device.type != "cuda":
            raise ValueError(
                f"overlap=True decodes on a CUDA stream of its own and the pipeline is on {device}. Move it to a GPU, or "
                "call set_decoder(overlap=False)."
            )
        if self.light is None:
            self._check_hooks()
            VaeDecodeStream(self.vae).check_options(batch=batch)

    def _check_hooks(self) -> None:
        moved_whole = getattr(self.vae, "_hf_hook", None) is not None
        moved_by_part = getattr(self.vae.decoder, "_diffusers_hook", None) is not None
        if self.options.overlap and (moved_whole or moved_by_part):
            raise NotImplementedError(
                "overlap=True needs the VAE to stay on the GPU, and it is offloaded. Call set_decoder(overlap=False), or "
                "remove the offloading."
            )
        if self.options.compile and moved_by_part:
            raise NotImplementedError(
                "compile=True can't compile a decoder that group offloading moves part by part. Call "
                "set_decoder(compile=False), or remove the offloading."
            )

    def open(self, device: torch.device) -> DecodeStream:
        """State for one rollout; brings a light decoder to ``device``."""
        if self.light is None:
            return VaeDecodeStream(self.vae, self._vae_step)
        return LightDecodeStream(self.light.to(device), self._light_step)

    def state_bytes(self, latent_height: int, latent_width: int) -> int:
        """Bytes that the state of one row holds."""
        if self.light is not None:
            return light_state_bytes(self.light, 1, latent_height, latent_width)
        return decode_state_bytes(self.vae, 1, latent_height, latent_width, self.vae.dtype)

    def work_bytes(self, latents: tuple[int, ...]) -> int:
        """Estimated working memory of decoding a chunk of this shape (B, C, n, h, w), uncompiled; state left out."""
        if self.light is None:
            return vae_decode_bytes(self.vae, latents, self.vae.dtype)
        light = self.light
        shape = (light.latent_channels, light.widths, light.time_factors, light.patch_size)
        return light_decode_bytes(shape, latents, light.dtype)


class DecoderSettings:
    """The pipeline's methods around its decoder."""

    vae: Any
    transformer: Any
    vae_scale_factor_spatial: int
    vae_scale_factor_temporal: int
    _decoding: Decoding | None = None
    if TYPE_CHECKING:

        @property
        def _execution_device(self) -> torch.device: ...
        @property
        def recipe(self) -> Recipe: ...

    @property
    def decoding(self) -> Decoding:
        """The decoder that calls use, with its options; made anew where the VAE was replaced."""
        known = self._decoding
        if known is None or known.vae is not self.vae:
            light, options = (None, DecodeOptions()) if known is None else (known.light, known.options)
            self._decoding = known = Decoding(self.vae, light, options)
        return known

    def set_decoder(
        self,
        light: LightDecoder | None = None,
        *,
        compile: bool = False,
        channels_last: bool = False,
        overlap: bool = False,
    ) -> None:
        """Choose what makes the frames from now on, and how; streams that are open keep theirs. Not saved.

        Args:
            light: decodes in the VAE's place; moved to the pipeline's device when a stream opens, its dtype stays its
                own. None: the pipeline's VAE. Given images and videos are encoded by the VAE either way.
            compile, channels_last, overlap: see ``DecodeOptions``.

        Raises:
            TypeError: no ``LightDecoder``.
            ValueError: the light decoder's channels or factors are not those of the pipeline's models.
        """
        if light is not None:
            self._check_light(light)
        options = DecodeOptions(compile=compile, channels_last=channels_last, overlap=overlap)
        known = self.decoding
        # Weights that the last call laid out for the GPU go back, unless they are wanted so again.
        for module in (known.light, *([self.vae.decoder, self.vae.post_quant_conv] if self.vae is not None else [])):
            if module is not None and known.options.channels_last:
                set_conv_layout(module, channels_last=False)
        self._decoding = Decoding(self.vae, light, options)
        chosen = [light] if light is not None else [self.vae.decoder, self.vae.post_quant_conv]
        for module in chosen if channels_last else []:
            set_conv_layout(module, channels_last=True)

    def _check_light(self, light: LightDecoder) -> None:
        if not isinstance(light, LightDecoder):
            raise TypeError(f"`light` must be a LightDecoder, such as LightDecoder.from_file(path), got {light!r}.")
        needed = {"spatial factor": self.vae_scale_factor_spatial, "temporal factor": self.vae_scale_factor_temporal}
        have = {"spatial factor": light.spatial_factor, "temporal factor": light.temporal_factor}
        if self.transformer is not None:
            needed["latent channels"] = self.transformer.config["in_channels"]
            have["latent channels"] = light.latent_channels
        wrong = [f"{name} {have[name]} instead of {value}" for name, value in needed.items() if have[name] != value]
        if wrong:
            raise ValueError(
                f"this light decoder has {', '.join(wrong)}; take one made for this model's latents (taew2_1 for Wan 2.1, "
                "taew2_2 for Wan 2.2)."
            )

    @torch.no_grad()
    def warmup_decoder(
        self, height: int | None = None, width: int | None = None, *, recipe: Recipe | None = None, num_videos: int = 1
    ) -> float:
        """Decode three chunks of zeros, so that no chunk of a video waits for compilation or for kernels to load.

        Args:
            height, width: pixels; None: the recipe's.
            recipe: chunk lengths; None: the pipeline's.
            num_videos: rows decoded together.

        Returns: seconds it took.

        Raises:
            ValueError, NotImplementedError: the options forbid it here.
        """
        recipe = recipe if recipe is not None else self.recipe
        device, factor, decoding = self._execution_device, self.vae_scale_factor_spatial, self.decoding
        decoding.check(device, num_videos)
        size = ((height or recipe.height) // factor, (width or recipe.width) // factor)
        channels = self.transformer.config["in_channels"]
        began, stream = time.perf_counter(), decoding.open(device)
        # Where videos will be decoded: code and workspaces belong to a CUDA stream.
        lane = torch.cuda.stream(decode_lane(device)) if decoding.options.overlap else nullcontext()
        with lane:
            for frames in (recipe.first_chunk_frames or recipe.chunk_frames, recipe.chunk_frames, recipe.chunk_frames):
                stream.decode(torch.zeros(num_videos, channels, frames, *size, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began
