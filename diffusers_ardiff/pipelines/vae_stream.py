"""The causal video VAE as a stream: chunks in, chunks out, with the state held by the caller.

    stream = VaeDecodeStream(vae)
    for latents in chunks:                  # (B, C, n, h, w), 3 latent frames each
        frames = stream.decode(latents)     # (B, 3, 9, H, W), then (B, 3, 12, H, W), ...

``vae.decode`` forgets the past at every call, so decoding 21 latent frames as 7 x 3 with it gives 7 x 9 = 63 pixel
frames, with a seam at every chunk. Here the feature cache is carried over and the same chunks give 9 + 6 x 12 = 81.

Shapes: B rows, C latent channels, n latent frames, h x w latent size, H x W pixel size.
"""

from __future__ import annotations

import copy
import inspect
import json
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, patchify

from ..transfer import upload
from ..validation import check_int
from .decode_step import CacheEntry, DecodeStep, decode_step

_REQUIRED_ARGUMENTS = {
    "encoder": ("feat_cache", "feat_idx"),
    "decoder": ("feat_cache", "feat_idx", "first_chunk"),
}
_REQUIRED_CONFIG = ("z_dim", "latents_mean", "latents_std", "temperal_downsample", "dim_mult", "patch_size")


def num_pixel_frames(num_latent_frames: int, factor: int) -> int:
    """Pixel frames of a video: the first latent frame is one, every other one is ``factor``. 21 at 4 give 81.

    Raises:
        ValueError: an argument is not a whole number of at least 1.
    """
    check_int("num_latent_frames", num_latent_frames, minimum=1)
    return 1 + (num_latent_frames - 1) * check_int("factor", factor, minimum=1)


def num_latent_frames(num_pixel_frames: int, factor: int) -> int:
    """Fewest latent frames that hold ``num_pixel_frames``. At factor 4, 81 need 21 and 82 need 22.

    Raises:
        ValueError: an argument is not a whole number of at least 1.
    """
    check_int("num_pixel_frames", num_pixel_frames, minimum=1)
    return 1 + -(-(num_pixel_frames - 1) // check_int("factor", factor, minimum=1))


def temporal_factor(vae: AutoencoderKLWan) -> int:
    """Pixel frames per latent frame after the first, counted from the layers that the config builds.

    ``config.scale_factor_temporal`` repeats this number, but nothing in the VAE makes the two agree.

    Raises:
        TypeError: the VAE is not of the supported kind.
    """
    check_streamable_vae(vae)
    return 2 ** sum(vae.config["temperal_downsample"])


def spatial_factor(vae: AutoencoderKLWan) -> int:
    """Pixels per latent along each side, counted from the layers that the config builds.

    Raises:
        TypeError: the VAE is not of the supported kind.
    """
    check_streamable_vae(vae)
    return 2 ** (len(vae.config["dim_mult"]) - 1) * (vae.config["patch_size"] or 1)


def check_streamable_vae(vae: AutoencoderKLWan) -> None:
    """Refuse a VAE whose causal state cannot be held by the caller.

    Raises:
        TypeError: with the class given and everything it lacks.
    """
    missing = [f"config.{name}" for name in _REQUIRED_CONFIG if name not in getattr(vae, "config", {})]
    missing += [name for name in ("quant_conv", "post_quant_conv") if not hasattr(vae, name)]
    counts = getattr(vae, "_cached_conv_counts", {})
    missing += [f"_cached_conv_counts[{part!r}]" for part in _REQUIRED_ARGUMENTS if part not in counts]
    for part, names in _REQUIRED_ARGUMENTS.items():
        module = getattr(vae, part, None)
        # torch.compile(module) hides the signature behind *args.
        module = getattr(module, "_orig_mod", module)
        accepted = inspect.signature(module.forward).parameters if isinstance(module, torch.nn.Module) else {}
        missing += [f"{part}({name}=...)" for name in names if name not in accepted]
    if missing:
        raise TypeError(
            f"{type(vae).__name__} cannot be streamed, it lacks {', '.join(missing)}. "
            "An AutoencoderKLWan or a VAE with the same causal interface is needed."
        )


def decode_state_bytes(
    vae: AutoencoderKLWan, batch: int, latent_height: int, latent_width: int, dtype: torch.dtype
) -> int:
    """Bytes that a :class:`VaeDecodeStream` holds from its second latent frame on, before anything is allocated.

    A decoder built from the VAE's config runs on the meta device; answers are remembered.

    Args:
        vae: the VAE that will decode; only its class and config are read.
        batch: rows decoded together.
        latent_height, latent_width: size of the latents.
        dtype: the dtype the VAE will compute in.

    Raises:
        TypeError: the VAE is not of the supported kind.
        ValueError: a count is not a whole number of at least 1.
    """
    check_streamable_vae(vae)
    for name, value in (("batch", batch), ("latent_height", latent_height), ("latent_width", latent_width)):
        check_int(name, value, minimum=1)
    config = json.dumps({key: value for key, value in vae.config.items() if not key.startswith("_")})
    vae_class: Any = type(vae)
    return _decode_state_bytes(vae_class, config, (batch, latent_height, latent_width), dtype)


@lru_cache(maxsize=64)
def _decode_state_bytes(vae_class: type[Any], config: str, size: tuple[int, int, int], dtype: torch.dtype) -> int:
    with torch.device("meta"):
        # The module's own `to`: the host's warns about a list of float32 modules that is empty here.
        vae = vae_class.from_config(json.loads(config))
        torch.nn.Module.to(vae, dtype)
        stream = VaeDecodeStream(vae)
        batch, height, width = size
        stream.decode(torch.empty(batch, vae.config["z_dim"], 2, height, width))
    return stream.state_bytes


class _CausalStream:
    """Feature cache of one half of a VAE, and the rules of its use."""

    _part: ClassVar[Literal["encoder", "decoder"]]

    def __init__(self, vae: AutoencoderKLWan) -> None:
        check_streamable_vae(vae)
        self._vae = vae
        self.check_options(batch=1)
        self.reset()

    def reset(self) -> None:
        """Forget the past and free the state; the next chunk begins a video of any size."""
        self._cache: list[CacheEntry] = [None] * self._vae._cached_conv_counts[self._part]
        self._layout: tuple[tuple[int, ...], torch.dtype] | None = None
        self._statistics: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_latent_frames = 0
        self._is_consistent = True

    def fork(self) -> Self:
        """A second stream that goes on from the same past. State tensors are replaced, never written: no copy."""
        other = copy.copy(self)
        other._cache = list(self._cache)
        return other

    @property
    def num_latent_frames(self) -> int:
        """Latent frames that went through since the video began."""
        return self._num_latent_frames

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors held now. Constant from the second latent frame on."""
        return sum(entry.untyped_storage().nbytes() for entry in self._cache if isinstance(entry, torch.Tensor))

    def _begin(self, chunk: torch.Tensor) -> None:
        """Check a chunk against the past, then mark the state as unusable until the chunk is done."""
        self.check_options(batch=chunk.shape[0])
        if not self._is_consistent:
            raise RuntimeError(
                f"An earlier chunk stopped inside the {self._part}, so the state is half old and half new. "
                "Call reset() and begin the video again."
            )
        size = (chunk.shape[0], *chunk.shape[3:])
        layout = (size, self._vae.dtype)
        if self._layout is not None and layout != self._layout:
            raise ValueError(
                f"A video keeps (batch, height, width) and dtype: it began with {self._layout[0]} in "
                f"{self._layout[1]}, got {size} in {self._vae.dtype}. Call reset() to begin another video."
            )
        self._layout = layout
        self._is_consistent = False
        # Calling the parts directly skips the hook that brings an offloaded VAE to its device.
        hook = getattr(self._vae, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward(self._vae)

    def _latent_statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of the latents; kept, since taking pinned memory may wait for all that the device does."""
        if self._statistics is None or self._statistics[0].device != like.device:
            values = (torch.tensor(self._vae.config[f"latents_{name}"]).float() for name in ("mean", "std"))
            mean, std = (upload(value, like.device).view(1, -1, 1, 1, 1) for value in values)
            self._statistics = mean, std
        return self._statistics

    def check_options(self, batch: int) -> None:
        """Raise NotImplementedError where the VAE's options forbid to stream ``batch`` rows."""
        if getattr(self._vae, "use_tiling", False):
            raise NotImplementedError(
                "A tiled VAE cannot be streamed, since every tile would need its own past. Call vae.disable_tiling() "
                "(a stream holds one chunk at a time, which bounds its memory), or process the whole video with "
                "vae.encode / vae.decode."
            )
        if batch > 1 and getattr(self._vae, "use_slicing", False):
            raise NotImplementedError(
                f"A sliced VAE cannot stream a batch of {batch}. Call vae.disable_slicing(), or open one stream a row."
            )


class VaeDecodeStream(_CausalStream):
    """Decoder state of one rollout; streams on the same VAE do not influence each other.

    How a video is cut into decoder calls depends on the chunks alone: the first latent frame by itself, then what is
    left of the chunk at once. The same chunks give the same bits; other chunks, and ``vae.decode`` of the whole
    video, agree to float rounding.

    Args:
        vae: an ``AutoencoderKLWan``. Its own feature maps are never touched.
        step: how a part is decoded; a ``CompiledStep`` is one that was compiled.

    Raises:
        TypeError: the VAE is not of the supported kind.
        NotImplementedError: tiling is on.
    """

    _part = "decoder"

    def __init__(self, vae: AutoencoderKLWan, step: DecodeStep = decode_step) -> None:
        super().__init__(vae)
        self._step = step

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode the next chunk.

        Args:
            latents: (B, C, n, h, w), normalised as the transformer makes them, floating point, on the device that the
                VAE computes on.

        Returns:
            (B, 3, frames, H, W), float32 in [-1, 1]; ``4n - 3`` frames for the first chunk and ``4n`` afterwards,
            where the temporal factor is 4.

        Raises:
            ValueError: wrong shape, or batch, size or dtype other than this video began with.
            RuntimeError: an earlier chunk was interrupted; ``reset()`` first.
            NotImplementedError: tiling, or slicing with several rows, is on.
        """
        channels = self._vae.config["z_dim"]
        if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
            raise ValueError(
                f"latents must be (batch, {channels}, frames, height, width), got {tuple(latents.shape)}."
            )
        self._begin(latents)
        mean, std = self._latent_statistics(latents)
        hidden = self._vae.post_quant_conv((latents.float() * std + mean).to(self._vae.dtype))
        # The decoder drops the frames before the first one only if that call holds a single latent frame.
        sizes = [1, hidden.shape[2] - 1] if self._num_latent_frames == 0 else [hidden.shape[2]]
        parts = [self._decode_part(part) for part in hidden.split(sizes, dim=2) if part.shape[2]]
        self._is_consistent = True
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _decode_part(self, hidden: torch.Tensor) -> torch.Tensor:
        patch_size = self._vae.config["patch_size"] or 1
        pixels, state = self._step(self._vae.decoder, hidden, tuple(self._cache), patch_size)
        self._cache = list(state)
        self._num_latent_frames += hidden.shape[2]
        return pixels


class VaeEncodeStream(_CausalStream):
    """Encoder state of one video; streams on the same VAE do not influence each other.

    Args:
        vae: an ``AutoencoderKLWan``. Its own feature maps are never touched.

    Raises:
        TypeError: the VAE is not of the supported kind.
        NotImplementedError: tiling is on.
    """

    _part = "encoder"

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Encode the next chunk to the mode of the posterior.

        Args:
            video: (B, 3, n, H, W), floating point in [-1, 1], on the device that the VAE computes on. With a temporal
                factor of 4, n is 1 + 4k for the first chunk and 4k afterwards.

        Returns:
            (B, C, frames, h, w), float32, normalised as the transformer takes them.

        Raises:
            ValueError: wrong shape or number of frames (the message names the nearest right ones), or batch, size or
                dtype other than this video began with.
            RuntimeError: an earlier chunk was interrupted; ``reset()`` first.
            NotImplementedError: tiling, or slicing with several rows, is on.
        """
        factor = temporal_factor(self._vae)
        is_first = self._num_latent_frames == 0
        self._check_video(video, factor, is_first)
        self._begin(video)
        pixels = patchify(video.to(self._vae.dtype), patch_size=self._vae.config["patch_size"] or 1)
        # Latent by latent, as the host does: the activations are those of one latent frame, however long the video is.
        sizes = [1] * is_first + [factor] * ((video.shape[2] - is_first) // factor)
        parts = [self._vae.encoder(part, feat_cache=self._cache, feat_idx=[0]) for part in pixels.split(sizes, dim=2)]
        mode = self._vae.quant_conv(torch.cat(parts, dim=2)).chunk(2, dim=1)[0].float()
        mean, std = self._latent_statistics(mode)
        self._num_latent_frames += len(parts)
        self._is_consistent = True
        return (mode - mean) / std

    def _check_video(self, video: torch.Tensor, factor: int, is_first: bool) -> None:
        if video.ndim != 5 or video.shape[1] != 3 or 0 in video.shape:
            raise ValueError(f"video must be (batch, 3, frames, height, width), got {tuple(video.shape)}.")
        side = spatial_factor(self._vae)
        if video.shape[3] % side or video.shape[4] % side:
            raise ValueError(f"height and width must be multiples of {side}, got {video.shape[3]} x {video.shape[4]}.")
        num_frames, offset = video.shape[2], int(is_first)
        if (num_frames - offset) % factor:
            lower = offset + (num_frames - offset) // factor * factor
            nearest = f"{lower} or {lower + factor}" if lower else f"{factor}"
            raise ValueError(f"{num_frames} frames do not fill whole latent frames; use {nearest}.")


def encode_video(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Encode a whole video to normalised latents, the mode of the posterior, without touching the VAE's own state.

    Args:
        vae: an ``AutoencoderKLWan``.
        video: (B, 3, n, H, W), floating point in [-1, 1]; n is 1 + 4k where the temporal factor is 4.

    Returns:
        (B, C, 1 + (n - 1) / 4, h, w), float32.

    Raises:
        TypeError: the VAE is not of the supported kind.
        ValueError: wrong shape, or n is not 1 + 4k; the message names the neighbours (77 and 81 for 80).
        NotImplementedError: tiling, or slicing with several rows, is on.
    """
    return VaeEncodeStream(vae).encode(video)
