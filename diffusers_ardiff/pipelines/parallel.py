"""The pipeline's methods for several processes a video."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..parallel import HeadExchange, ParallelLayout, TokenSharding, VideoGroups, build_groups, check_backend_ready
from ..parallel.groups import DEFAULT_TIMEOUT
from ..processors import PagedAttachment
from .inputs import check_choices
from .output import ARChunk
from .remote_decode import Closable, receive_chunks

if TYPE_CHECKING:
    from .decoding import Decoding

_ON_ALREADY = (
    "parallelism is on already, by enable_parallelism() of the pipeline or of the transformer; use one of them. "
    "pipe.disable_parallelism() undoes the pipeline's; diffusers can't undo its own: load the transformer again."
)
SINGLE = ParallelLayout()
"""One process makes a video alone."""


class Parallelism:
    """The pipeline's methods around several processes a video."""

    transformer: Any
    _groups: VideoGroups | None = None
    _sharding: TokenSharding | None = None
    _host_config: Any = None
    _decoded_elsewhere: weakref.ref[Closable] | None = None
    if TYPE_CHECKING:
        video_processor: Any

        @property
        def decoding(self) -> Decoding: ...
        @property
        def _execution_device(self) -> torch.device: ...
        def cooldown(self) -> None: ...

    @property
    def parallel_layout(self) -> ParallelLayout:
        """Which process does what; one process alone where parallelism is off.

        Raises: as ``enable_parallelism``, where the transformer's own context parallelism can't be served.
        """
        self._follow_host()
        return self._groups.layout if self._groups is not None else SINGLE

    @property
    def parallel_groups(self) -> VideoGroups | None:
        """The groups of this rank's team; None where parallelism is off."""
        self._follow_host()
        return self._groups

    @property
    def token_sharding(self) -> TokenSharding | None:
        """How tokens and heads are dealt out; None where one rank has all of a branch."""
        self._follow_host()
        return self._sharding

    @property
    def decoded_elsewhere(self) -> Closable | None:
        """The last stream whose frames another rank decodes; None: none, or it is gone."""
        return self._decoded_elsewhere() if self._decoded_elsewhere is not None else None

    @decoded_elsewhere.setter
    def decoded_elsewhere(self, stream: Closable) -> None:
        self._decoded_elsewhere = weakref.ref(stream) if self.parallel_layout.decode_rank else None

    def enable_parallelism(
        self,
        *,
        ulysses_degree: int = 1,
        guidance_parallel: bool = False,
        decode_rank: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        num_ranks: int | None = None,
    ) -> ParallelLayout:
        """Make each video on several processes; called on all of them, before the first call.

        Every rank then makes the same calls with the same arguments and gets the same latents. Its pool holds its share
        of the heads, of its branch.

        Args:
            ulysses_degree: ranks that the heads of a branch are dealt out to; divides the model's heads. A chunk's tokens
                need not divide, they are padded.
            guidance_parallel: the negative branch on ranks of its own; for calls with guidance only.
            decode_rank: one more rank a team, its last, decodes chunk n while the others denoise chunk n + 1: it iterates over
                ``receive_chunks()``, they make ``output_type="latent"``.
            timeout: seconds a rank waits for another before it gives up.
            num_ranks: the first ranks that take part; None: all. More ranks than a team has make several teams.

        Returns: who does what: ``team``, ``num_teams``, ``is_leader``.

        Raises:
            RuntimeError: no process group, or parallelism is on already.
            ValueError: the degree does not divide the heads, or the ranks; the message names what is legal.
            TypeError: a degree above 1, and the transformer's family can't be cut.
        """
        check_backend_ready()
        if self._groups is not None or _host_parallel_config(self.transformer) is not None:
            raise RuntimeError(_ON_ALREADY)
        layout = ParallelLayout(
            ulysses_degree=ulysses_degree,
            guidance_parallel=guidance_parallel,
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            num_ranks=num_ranks,
            decode_rank=decode_rank,
        )
        self._take_part(layout, timeout=timeout, host_cuts=False)
        return layout

    @torch.no_grad()
    def receive_chunks(self, output_type: str = "np") -> Generator[ARChunk]:
        """On the rank that decodes: the frames of the next stream that its team opens, chunk by chunk until it closes.

        Args:
            output_type: "np", "pt" or "pil".

        Raises:
            ValueError: this rank decodes for nobody, or an unknown output type.
            RuntimeError: the leader died, or its stream failed: the video is not whole.
        """
        check_choices(output_type, (), ())
        yield from receive_chunks(
            self.parallel_groups, self.decoding, self.video_processor, self._execution_device, output_type
        )

    def disable_parallelism(self) -> None:
        """Leave the groups; every process then makes its videos alone. No-op where parallelism is off.

        Raises:
            RuntimeError: it was diffusers that was told to run the transformer on several ranks.
        """
        if _host_parallel_config(self.transformer) is not None:
            raise RuntimeError(_ON_ALREADY)
        self._leave()

    def _leave(self) -> None:
        if self._groups is None:
            return
        self.cooldown()
        if self._sharding is not None:
            self._sharding.exchange.close()
        self._groups.close()
        self._groups = self._sharding = None

    def _take_part(self, layout: ParallelLayout, *, timeout: float, host_cuts: bool) -> None:
        attachment = PagedAttachment(self.transformer)
        if layout.ulysses_degree > 1:
            attachment.check_sharding()
        layout.heads_per_rank(attachment.geometry.num_heads)
        # Compiled blocks, graphs and the warm pool are those of another share of the heads.
        self.cooldown()
        groups = build_groups(layout, timeout=timeout)
        if groups is not None and groups.heads is not None:
            self._sharding = TokenSharding(HeadExchange(groups.heads, layout.shard), host_cuts=host_cuts)
        self._groups = groups

    def _follow_host(self) -> None:
        """Take part in the context parallelism that diffusers was told to run the transformer with."""
        config = _host_parallel_config(self.transformer)
        if config is self._host_config:
            return
        if self._host_config is None and self._groups is not None:
            raise RuntimeError(_ON_ALREADY)
        if config is not None:
            degree = _checked_degree(config)
            layout = ParallelLayout(ulysses_degree=degree, world_size=dist.get_world_size(), rank=dist.get_rank())
        self._leave()
        if config is not None:
            self._take_part(layout, timeout=DEFAULT_TIMEOUT, host_cuts=True)
        self._host_config = config


def _host_parallel_config(transformer: Any) -> Any:
    """diffusers' context parallel config of the transformer, None where it has none."""
    return getattr(getattr(transformer, "_parallel_config", None), "context_parallel_config", None)


def _checked_degree(config: Any) -> int:
    """The Ulysses degree of a config that the paged cache can serve; ValueError for others."""
    if config.ring_degree > 1:
        raise ValueError(
            f"ring_degree={config.ring_degree}: ring attention sends the keys of the whole window round in every step, and "
            "the cache keeps all tokens of its heads on one rank. Use ContextParallelConfig(ulysses_degree=...)."
        )
    if config.ulysses_anything or config.mesh is not None:
        raise ValueError(
            "ContextParallelConfig(ulysses_anything=True) and a mesh of your own can't be served: every rank's pool holds "
            "the same number of heads, and teams are cut from the world's ranks. Use pipe.enable_parallelism(), which "
            "pads tokens that don't divide."
        )
    return int(config.ulysses_degree)
