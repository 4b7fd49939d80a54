"""A tiny real Wan transformer, a paged run of it, and two stock runs to compare with: masked, and with a dense cache.

Frames are 4 x 6 latents, so C = 6 tokens, which no page of 16 divides into.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from dense import TokenHistory
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed
from rollouts import make_manager

from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import PagedAttachment, attach_paged_attention
from diffusers_ardiff.rope import VideoRope

CHANNELS, HEIGHT, WIDTH, TOKENS = 4, 4, 6, 6
HEADS, HEAD_DIM, TEXT_DIM = 2, 12, 8

TINY = {
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


def tiny_transformer(model_class: type = WanTransformer3DModel, **changes: Any) -> Any:
    """Random weights, all of them: layers initialised to one or zero would hide a norm that is not applied."""
    torch.manual_seed(0)
    transformer = model_class(**{**TINY, **changes}).eval().requires_grad_(False)
    for name, parameter in transformer.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif "to_" in name and name.endswith("weight"):
            parameter.mul_(2)
    return transformer


def latents_of(frames: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """(rows, channels, frames, height, width)."""
    return torch.randn(rows, CHANNELS, frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def text_of(length: int = 7, rows: int = 1, seed: int = 2) -> torch.Tensor:
    """(rows, length, text_dim)."""
    return torch.randn(rows, length, TEXT_DIM, generator=torch.Generator().manual_seed(seed))


class PagedRun:
    """Chunks of one or several sessions through a transformer with paged processors; lengths in frames."""

    def __init__(
        self,
        transformer: Any,
        sink: int,
        window: int,
        *,
        backend: str | None = None,
        write: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.transformer = transformer
        self.paged: PagedAttachment = attach_paged_attention(transformer, backend=backend, write=write)
        geometry = self.paged.geometry
        kwargs = {"layers": geometry.num_layers, "heads": geometry.num_heads, "head_dim": geometry.head_dim, **kwargs}
        self.manager = make_manager(TOKENS * sink, TOKENS * window, **kwargs)
        self.branches = [self.manager.open_session().branch() for _ in range(kwargs.get("max_sessions", 1))]
        self.rope = VideoRope(head_dim=geometry.head_dim)

    def forward(
        self,
        latents: torch.Tensor,
        timestep: float,
        text: torch.Tensor,
        *,
        commit: bool = True,
        bind_text: bool = True,
    ) -> torch.Tensor:
        """One forward of all branches as rows."""
        frames = latents.shape[2]
        context = PagedForwardContext(self.branches, num_tokens=TOKENS * frames)
        place = (context.storage.device, self.transformer.dtype)
        latents, text = latents.to(*place), text.to(*place)
        starts = [start // TOKENS for start in context.starts]
        rotary = self.rope([range(s, s + frames) for s in starts], HEIGHT // 2, WIDTH // 2, device=latents.device)
        text_kv = self.paged.compute_text_kv(text) if bind_text else None
        with context, self.paged.bind(context, rotary, text_kv):
            out = run_host(self.transformer, latents, timestep, text)
        if commit:
            context.mark_committed()
        return out


def run_host(transformer: Any, latents: torch.Tensor, timestep: float, text: torch.Tensor) -> torch.Tensor:
    """A plain forward at one timestep."""
    times = torch.full((len(latents),), float(timestep), device=latents.device)
    with torch.no_grad():
        return transformer(latents, times, text, return_dict=False)[0]


# -- the whole video at once, with a mask ---------------------------------------------------------------------------


class MaskedProcessor(WanAttnProcessor):
    """The stock processor, given a 2-D mask in self-attention."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        mask = self.mask if encoder_hidden_states is None else None
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, rotary_emb)


def window_mask(chunks: Sequence[int], sink: int, window: int) -> torch.Tensor:
    """(tokens, tokens) bool: a chunk sees the first ``sink`` frames and the last ``window`` up to its own end."""
    total = sum(chunks)
    mask = torch.zeros(total, total, dtype=torch.bool)
    end = 0
    for length in chunks:
        begin, end = end, end + length
        mask[begin:end, :sink] = True
        mask[begin:end, max(end - window, 0) : end] = True
        mask[begin:end, end:] = False
    return mask.repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)


def masked_copy(transformer: Any, mask: torch.Tensor) -> Any:
    """The stock transformer, its self-attention masked."""
    twin = copy.deepcopy(transformer)
    twin.set_attn_processor(MaskedProcessor(mask))
    return twin


def masked_forward(
    transformer: Any, latents: torch.Tensor, frame_times: Sequence[float], text: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """All frames in one forward, each at its own timestep."""
    times = torch.tensor(frame_times, dtype=torch.float32).repeat_interleave(TOKENS)[None]
    with torch.no_grad():
        return masked_copy(transformer, mask)(latents, times, text, return_dict=False)[0]


# -- chunk by chunk, with a dense cache -----------------------------------------------------------------------------


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of the last dimension as complex numbers."""
    turn = torch.complex(cos[..., 0::2].double(), sin[..., 0::2].double())
    pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).float()


class DenseCacheProcessor:
    """Self-attention over an explicit list of this layer's tokens; ``pending`` are the last forward's rows."""

    def __init__(self, sink: int, window: int) -> None:
        self.history = TokenHistory(TOKENS * sink, TOKENS * window)
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key, value = (t.unflatten(2, (HEADS, -1)) for t in (query, key, attn.to_v(hidden_states)))
        query, key = rotate(query, *rotary_emb), rotate(key, *rotary_emb)
        self.pending = (key[0], value[0])
        out = self.history.attend(query[0], key[0], value[0])[None]
        return attn.to_out[0](out.flatten(2, 3))


class FarRope(torch.nn.Module):
    """The host's own rope with a long table; returns the rows of frames from ``start_frame``."""

    def __init__(self, num_frames: int) -> None:
        super().__init__()
        self.table = WanRotaryPosEmbed(HEAD_DIM, (1, 2, 2), num_frames)
        self.start_frame = 0

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        end = self.start_frame + hidden_states.shape[2]
        whole = self.table(torch.empty(1, 1, end, *hidden_states.shape[3:], device="meta"))
        return tuple(part[:, TOKENS * self.start_frame :] for part in whole)


class DenseRun:
    """Chunks through a stock transformer whose layers keep a dense cache."""

    def __init__(self, transformer: Any, sink: int, window: int, *, table_frames: int = 64) -> None:
        self.transformer = copy.deepcopy(transformer)
        self.transformer.rope = FarRope(table_frames)
        self.layers = [DenseCacheProcessor(sink, window) for _ in self.transformer.blocks]
        for block, processor in zip(self.transformer.blocks, self.layers, strict=True):
            block.attn1.set_processor(processor)

    def skip_to(self, frame: int) -> None:
        """An empty history that continues at ``frame``."""
        for layer in self.layers:
            layer.history.committed_end = layer.history.origin = TOKENS * frame

    def forward(
        self, latents: torch.Tensor, timestep: float, text: torch.Tensor, *, commit: bool = True
    ) -> torch.Tensor:
        """One forward; ``commit`` keeps its rows."""
        self.transformer.rope.start_frame = self.layers[0].history.committed_end // TOKENS
        out = run_host(self.transformer, latents, timestep, text)
        if commit:
            for layer in self.layers:
                layer.history.commit(*layer.pending)
        return out
