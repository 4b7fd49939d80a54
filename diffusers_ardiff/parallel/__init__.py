"""One video on several processes: heads sharded (Ulysses), guidance branches split; torch.distributed and nothing else."""

from .exchange import HeadExchange
from .groups import DecodeLink, VideoGroups, all_processes, build_groups, check_backend_ready
from .launch import LaunchError, asked_processes, check_launch
from .layout import ParallelLayout, legal_degrees
from .sharding import TokenSharding

__all__ = [
    "DecodeLink",
    "HeadExchange",
    "LaunchError",
    "ParallelLayout",
    "TokenSharding",
    "VideoGroups",
    "all_processes",
    "asked_processes",
    "build_groups",
    "check_backend_ready",
    "check_launch",
    "legal_degrees",
]
