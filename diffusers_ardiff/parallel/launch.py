"""What was asked of the launcher, beside what it started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

_FLAGS = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
_ENABLED_BY = "accelerate launch --multi_gpu --num_processes {asked} --num_machines 1 ..."


class LaunchError(RuntimeError):
    """The job does not have the processes that it needs."""


def asked_processes(command_line: Sequence[str] | None = None) -> int | None:
    """Processes that the launcher was asked for, from its command line; None where there is none to see.

    Args:
        command_line: of the launcher; None: of this process's parent.
    """
    words = list(command_line) if command_line is not None else _parent_command()
    if not any("accelerate" in word or "torchrun" in word or "torch.distributed" in word for word in words[:4]):
        return None
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in _FLAGS:
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            return int(value) if value.isdecimal() else None
    return None


def check_launch(num_running: int, asked: int | None = None) -> None:
    """Notice a launch that started fewer processes than asked for.

    Args:
        num_running: processes of this job.
        asked: how many there should be; None: what the launcher's command line says.

    Raises:
        LaunchError: fewer run; the message has both numbers.
    """
    asked = asked_processes() if asked is None else asked
    if asked is not None and num_running < asked:
        hint = _ENABLED_BY.format(asked=asked)
        raise LaunchError(
            f"{asked} processes were asked for, {num_running} runs. `accelerate launch --cpu` starts one process, whatever "
            f"--num_processes says; use: {hint} (without a GPU too)."
        )


def _parent_command() -> list[str]:
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
