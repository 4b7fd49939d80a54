"""Which process does what: integers only.

World ranks are cut into *teams*, and a team makes one video at a time. Within a team the ranks of one guidance branch
follow each other, so the chatty exchange of heads stays between neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import check_int


def legal_degrees(num_heads: int) -> tuple[int, ...]:
    """How many ranks the heads of a layer can be dealt out to, evenly."""
    return tuple(degree for degree in range(1, num_heads + 1) if num_heads % degree == 0)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How the processes of a job share videos, branches and heads.

    Args:
        ulysses_degree: ranks that one branch's heads are dealt out to.
        guidance_parallel: positive and negative branch on ranks of their own.
        world_size, rank: of this process.
        decode_rank: one more rank a team, its last, which decodes what the others denoise.
        num_ranks: the first ranks that take part; None: all. Others make no video.

    Raises:
        ValueError: the ranks can't be cut into whole teams; the message has the numbers and what to start.
    """

    ulysses_degree: int = 1
    guidance_parallel: bool = False
    world_size: int = 1
    rank: int = 0
    num_ranks: int | None = None
    decode_rank: bool = False

    def __post_init__(self) -> None:
        check_int("ulysses_degree", self.ulysses_degree, minimum=1)
        check_int("world_size", self.world_size, minimum=1)
        check_int("rank", self.rank, minimum=0, maximum=self.world_size - 1)
        if self.members % self.team_size or self.members > self.world_size:
            halves = " x 2 guidance branches" if self.guidance_parallel else ""
            halves += " + 1 rank that decodes" if self.decode_rank else ""
            raise ValueError(
                f"ulysses_degree={self.ulysses_degree}{halves} makes teams of {self.team_size} processes, and "
                f"{self.world_size} run. Start {self.team_size} or a multiple of it: accelerate launch --multi_gpu "
                f"--num_processes {self.team_size} --num_machines 1 ..., or choose a smaller degree."
            )

    @property
    def members(self) -> int:
        """Ranks that take part."""
        return self.world_size if self.num_ranks is None else self.num_ranks

    @property
    def is_member(self) -> bool:
        """Whether this rank takes part."""
        return self.rank < self.members

    @property
    def num_branch_ranks(self) -> int:
        """Groups of ranks that branches are dealt out to: 2 under guidance parallelism, else 1."""
        return 2 if self.guidance_parallel else 1

    @property
    def num_denoisers(self) -> int:
        """Ranks of a team that run the transformer, its first ones."""
        return self.ulysses_degree * self.num_branch_ranks

    @property
    def team_size(self) -> int:
        """Ranks that make one video together."""
        return self.num_denoisers + self.decode_rank

    @property
    def num_teams(self) -> int:
        """Videos made at a time."""
        return self.members // self.team_size

    @property
    def team(self) -> int:
        """Which team this rank is in."""
        return self.rank // self.team_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its team."""
        return self.is_member and self.place == 0

    @property
    def place(self) -> int:
        """Number of this rank in its team."""
        return self.rank % self.team_size

    @property
    def is_decoder(self) -> bool:
        """Whether this rank decodes for its team, and does nothing else."""
        return self.is_member and self.place == self.num_denoisers

    @property
    def writes_frames(self) -> bool:
        """Whether this rank is the one of its team that should have the frames."""
        return self.is_decoder if self.decode_rank else self.is_leader

    @property
    def branch_index(self) -> int:
        """0: the positive branch (or all of them), 1: the negative one."""
        return self.place // self.ulysses_degree

    @property
    def shard(self) -> int:
        """Which share of the heads, and of a chunk's tokens, this rank has."""
        return self.place % self.ulysses_degree

    def team_ranks(self, team: int) -> list[int]:
        """World ranks of a team that denoise."""
        return list(range(team * self.team_size, team * self.team_size + self.num_denoisers))

    def head_ranks(self, team: int, branch_index: int) -> list[int]:
        """World ranks among which the heads of one branch are dealt out."""
        first = team * self.team_size + branch_index * self.ulysses_degree
        return list(range(first, first + self.ulysses_degree))

    def branch_ranks(self, team: int, shard: int) -> list[int]:
        """World ranks that hold the same share of each branch, the positive one's first."""
        return [self.head_ranks(team, index)[shard] for index in range(self.num_branch_ranks)]

    def heads_per_rank(self, num_heads: int) -> int:
        """Heads in each rank's pool.

        Raises:
            ValueError: the degree does not divide the heads; the message names the degrees that do.
        """
        if num_heads % self.ulysses_degree:
            raise ValueError(
                f"ulysses_degree={self.ulysses_degree} does not divide the model's {num_heads} attention heads. Legal "
                f"degrees: {list(legal_degrees(num_heads))}."
            )
        return num_heads // self.ulysses_degree

    def local_branches(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The branches whose pages this rank holds.

        Raises:
            ValueError: branches are to be split and there is only one.
        """
        if not self.guidance_parallel or self.is_decoder:
            return names
        if len(names) != 2:
            raise ValueError(
                "guidance_parallel=True splits a positive and a negative branch, but this call runs without guidance: "
                "give guidance_scale above 1, or enable_parallelism(guidance_parallel=False)."
            )
        return (names[self.branch_index],)
