"""Process groups of a team, and what its ranks agree on. Every call here is collective: all ranks of a team make it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .launch import LaunchError
from .layout import ParallelLayout

DEFAULT_TIMEOUT = 60.0
"""Seconds that a rank waits for another before it gives up; a dead rank must not hang the others."""

PATIENCE = timedelta(days=7)
"""How long a process whose work is done waits for the others'; one that dies is noticed at once."""


def check_backend_ready() -> None:
    """Raise LaunchError (a RuntimeError) unless the processes of this job know each other."""
    if not dist.is_available() or not dist.is_initialized():
        raise LaunchError(
            "no process group: start the script with `accelerate launch --multi_gpu --num_processes N --num_machines 1` "
            "and make accelerate's PartialState() before enable_parallelism(). (`accelerate launch --cpu` starts one "
            "process, whatever --num_processes says.)"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeLink:
    """Between a team's leader and its decoder.

    Args:
        control: the two through host memory (gloo), with patience: the decoder waits for as long as a chunk takes.
        data: the two through what their devices are linked by.
        leader, decoder: world ranks.
    """

    control: dist.ProcessGroup
    data: dist.ProcessGroup
    leader: int
    decoder: int

    def tell(self, message: Any) -> None:
        """Leader: hand over a message; waits until the decoder takes it."""
        dist.broadcast_object_list([message], src=self.leader, group=self.control)

    def hear(self) -> Any:
        """Decoder: the next message."""
        held: list[Any] = [None]
        dist.broadcast_object_list(held, src=self.leader, group=self.control)
        return held[0]

    def send(self, latents: torch.Tensor) -> None:
        """Leader: send a copy, so that the caller may edit its own."""
        dist.send(latents.contiguous().clone(), dst=self.decoder, group=self.data)

    def receive(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Decoder: latents of that shape, float32."""
        latents = torch.empty(shape, device=device)
        dist.recv(latents, src=self.leader, group=self.data)
        return latents


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoGroups:
    """The groups of this rank's team.

    Args:
        layout: who does what.
        heads: ranks that share this branch's heads; None where there is one.
        branches: the ranks with this share of each branch, the positive one first; None without guidance parallelism.
        team: all that denoise, through host memory (gloo), for agreements.
        decoder: link between the leader and the rank that decodes; None on others, and where there is none.
    """

    layout: ParallelLayout
    heads: dist.ProcessGroup | None
    branches: dist.ProcessGroup | None
    team: dist.ProcessGroup | None
    decoder: DecodeLink | None = None
    _closed: list[bool] = field(default_factory=list)

    def agree(self, what: str) -> None:
        """Wait until every rank of the team got here; none goes on where one has failed before.

        Raises:
            RuntimeError: a rank did not come.
        """
        if self.team is None:
            return
        try:
            dist.all_reduce(torch.zeros(1), group=self.team)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.layout.rank} waited for the other ranks of its team before {what}, and one did not come: it "
                "failed or was ended; its own traceback says why. Nothing was committed here."
            ) from error

    def share(self, value: Any) -> Any:
        """What the team's first rank gave, on all of them; it has to be picklable."""
        if self.team is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=dist.get_global_rank(self.team, 0), group=self.team)
        return held[0]

    def share_each(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of the team's first rank, one by one as they are asked for; none is None."""
        while (item := self.share(next(items, None))) is not None:
            yield item

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Compare arguments across the team.

        Raises:
            ValueError: they differ, on all ranks alike; the message names the first that does.
        """
        if self.team is None:
            return
        mine = {name: digest(value) for name, value in values.items()}
        everyone: list[dict[str, str]] = [{} for _ in range(self.layout.num_denoisers)]
        dist.all_gather_object(everyone, mine, group=self.team)
        for name in mine:
            if len({theirs.get(name) for theirs in everyone}) > 1:
                raise ValueError(
                    f"the ranks of a team make one video together, but were given different `{name}`. Give all of them "
                    "the same arguments, and generators with the same seed."
                )

    def gather_branches(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's prediction and the other branch's, the positive one first; both have the shape of ``local``."""
        local = local.contiguous()
        both = local.new_empty((2, *local.shape))
        dist.all_gather(list(both), local, group=self.branches)
        return both[0], both[1]

    def from_positive(self, prediction: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The positive branch's prediction, on the ranks of both; ``like`` has its shape and dtype."""
        assert self.branches is not None
        out = torch.empty_like(like) if prediction is None else prediction.contiguous()
        dist.broadcast(out, src=dist.get_global_rank(self.branches, 0), group=self.branches)
        return out

    def close(self) -> None:
        """Leave the groups; calling it again does nothing."""
        if self._closed:
            return
        self._closed.append(True)
        link = (self.decoder.control, self.decoder.data) if self.decoder is not None else ()
        for group in (self.heads, self.branches, self.team, *link):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def build_groups(layout: ParallelLayout, *, timeout: float = DEFAULT_TIMEOUT) -> VideoGroups | None:
    """Make the groups of all teams, as torch asks for; collective over all ranks of the job, in the same order.

    Returns: this rank's; None where it takes no part.

    Raises:
        RuntimeError: no process group was initialised.
    """
    check_backend_ready()
    patience = timedelta(seconds=timeout)
    heads = branches = team = link = None
    for index in range(layout.num_teams):
        for branch in range(layout.num_branch_ranks):
            heads = _own(layout, layout.head_ranks(index, branch), patience) or heads
        for shard in range(layout.ulysses_degree):
            branches = _own(layout, layout.branch_ranks(index, shard), patience) or branches
        team = _own(layout, layout.team_ranks(index), patience, backend="gloo") or team
        link = _link(layout, index, patience) or link
    if not layout.is_member:
        return None
    return VideoGroups(layout=layout, heads=heads, branches=branches, team=team, decoder=link)


def _link(layout: ParallelLayout, team: int, patience: timedelta) -> DecodeLink | None:
    if not layout.decode_rank:
        return None
    ranks = [team * layout.team_size, (team + 1) * layout.team_size - 1]
    control, data = _own(layout, ranks, PATIENCE, backend="gloo"), _own(layout, ranks, patience)
    if control is None or data is None:
        return None
    return DecodeLink(control=control, data=data, leader=ranks[0], decoder=ranks[1])


def all_processes() -> dist.ProcessGroup | None:
    """All processes of the job through host memory, with patience; None where there is one. Collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def _own(
    layout: ParallelLayout, ranks: list[int], patience: timedelta, *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A new group of these ranks where this one is in it; None for a group of one."""
    if len(ranks) == 1:
        return None
    group = dist.new_group(ranks, timeout=patience, backend=backend)
    return group if layout.rank in ranks else None


def digest(value: Any) -> str:
    """A short name of a value: equal values have equal ones, in every process."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor):
        found.update(repr((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)} items".encode())
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())
