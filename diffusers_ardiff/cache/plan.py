"""The memory plan: what a session will allocate, in bytes, before anything is. Integers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import check_int
from .layout import RingGeometry


class MemoryLimitError(RuntimeError):
    """A plan needs more bytes than allowed; the message has both numbers."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of the transformer's keys and values.

    Args:
        num_layers: layers that attend over the cache.
        num_heads, head_dim: attention heads and their size.
        itemsize: bytes an element of the pool.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "itemsize"):
            check_int(name, getattr(self, name), minimum=1)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a number of equal sessions take. ``*_bytes`` are for one session; ``total_bytes`` for all.

    ``forward_bytes`` and ``decode_bytes`` are estimates of working memory, for all sessions together: of one forward and
    of decoding one chunk. They are 0 where nobody asked for them, and are no part of ``total_bytes``, which is what
    sessions hold between forwards and what limits are compared with.

    ``staging_bytes`` is counted where a branch's pages are known to be fragmented (a shuffled pool): the gathered
    copy of the window that dense kernels read. ``sink_bytes`` is counted where the RoPE policy turns the sink's keys: a
    copy of them as they were written. ``replay_text_bytes`` is counted where it is asked for: the text K/V at fixed
    addresses that captured forwards read, from a warm-up with CUDA graphs on.
    """

    num_sessions: int
    num_branches: int
    pages_per_branch: int
    pool_bytes: int
    text_bytes: int
    vae_state_bytes: int
    latent_bytes: int
    staging_bytes: int = 0
    sink_bytes: int = 0
    replay_text_bytes: int = 0
    forward_bytes: int = 0
    decode_bytes: int = 0
    overlapped: bool = False

    @property
    def num_pages(self) -> int:
        """Pages of the whole pool."""
        return self.num_sessions * self.num_branches * self.pages_per_branch

    @property
    def bytes_per_session(self) -> int:
        """All that one session holds."""
        state = self.text_bytes + self.vae_state_bytes + self.latent_bytes
        return self.pool_bytes + state + self.staging_bytes + self.sink_bytes + self.replay_text_bytes

    @property
    def total_bytes(self) -> int:
        """All sessions together."""
        return self.num_sessions * self.bytes_per_session

    @property
    def work_bytes(self) -> int:
        """Working memory at one time: forwards and decoding take turns, unless they overlap."""
        parts = (self.forward_bytes, self.decode_bytes)
        return sum(parts) if self.overlapped else max(parts)

    @property
    def peak_bytes(self) -> int:
        """All that is allocated at once, weights left out."""
        return self.total_bytes + self.work_bytes

    def __str__(self) -> str:
        parts = {
            "K/V pages": self.pool_bytes,
            "text K/V": self.text_bytes,
            "decoder state": self.vae_state_bytes,
            "clean latents": self.latent_bytes,
            "staging": self.staging_bytes,
            "sink keys": self.sink_bytes,
            "text K/V of captured forwards": self.replay_text_bytes,
        }
        listed = ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in parts.items() if size)
        return (
            f"{self.total_bytes / 2**30:.3f} GiB for {self.num_sessions} session(s) of {self.num_branches} branch(es); "
            f"one session: {listed} ({self.pages_per_branch} pages a branch). {self._work_text()}"
        )

    def _work_text(self) -> str:
        if not self.work_bytes:
            return "Weights and activations come on top."
        return (
            f"Working memory of a forward about {self.forward_bytes / 2**30:.3f} GiB, of decoding a chunk "
            f"{self.decode_bytes / 2**30:.3f} GiB: {self.peak_bytes / 2**30:.3f} GiB at once. Weights come on top."
        )

    def check_limit(self, limit_bytes: int | None) -> None:
        """Refuse a plan that is larger than ``limit_bytes`` (None: no limit).

        Raises:
            MemoryLimitError: with the bytes needed, the bytes allowed and the parts.
        """
        if limit_bytes is not None and self.total_bytes > check_int("limit_bytes", limit_bytes, minimum=0):
            raise MemoryLimitError(
                f"{self.num_sessions} session(s) with {self.num_branches} branch(es) need {self.total_bytes:,} bytes, "
                f"{limit_bytes:,} are allowed. One session: K/V pages {self.pool_bytes:,}, text K/V "
                f"{self.text_bytes:,}, VAE state {self.vae_state_bytes:,}, clean latents {self.latent_bytes:,}, "
                f"staging {self.staging_bytes:,}, sink keys {self.sink_bytes:,}, text K/V of captured forwards "
                f"{self.replay_text_bytes:,}. Use a smaller window, fewer prompts or a smaller frame."
            )


@dataclass(frozen=True, kw_only=True)
class SideState:
    """Bytes of one session that are not pages: text K/V and turned sinks of all its branches, VAE state, latents."""

    text_bytes: int = 0
    vae_state_bytes: int = 0
    latent_bytes: int = 0
    sink_bytes: int = 0


def plan_memory(
    geometry: RingGeometry,
    kv_shape: KVShape,
    *,
    num_sessions: int = 1,
    num_branches: int = 1,
    side_state: SideState | None = None,
    fragmented: bool = False,
) -> MemoryPlan:
    """Compute what ``num_sessions`` sessions of ``num_branches`` branches will allocate.

    Example: 18 frames of 1560 tokens, 40 layers of 40 x 128 in 2 bytes are 1755 pages of 16 slots, 23.0 GB.

    Raises:
        ValueError: a count is not positive.
    """
    check_int("num_sessions", num_sessions, minimum=1)
    check_int("num_branches", num_branches, minimum=1)
    side = side_state if side_state is not None else SideState()
    page_bytes = geometry.page_size * kv_shape.bytes_per_token
    return MemoryPlan(
        num_sessions=num_sessions,
        num_branches=num_branches,
        pages_per_branch=geometry.num_pages,
        pool_bytes=num_branches * geometry.num_pages * page_bytes,
        text_bytes=side.text_bytes,
        vae_state_bytes=side.vae_state_bytes,
        latent_bytes=side.latent_bytes,
        sink_bytes=side.sink_bytes,
        staging_bytes=num_branches * geometry.max_seq_len * kv_shape.bytes_per_token if fragmented else 0,
    )
