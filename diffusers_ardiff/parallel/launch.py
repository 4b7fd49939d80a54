"""What was asked of the launcher, beside what it started."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil
from huggingface_hub import constants

_CONFIGURED = re.compile(r'^[\s{]*"?num_processes"?\s*:\s*(\d+)', re.MULTILINE)
_CONFIG_FLAGS = ("--config_file", "--config-file")
_FLAGS = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
_ENABLED_BY = "accelerate launch --multi_gpu --num_processes {asked} --num_machines 1 ..."


class LaunchError(RuntimeError):
    """The job does not have the processes that it needs."""


def asked_processes(command_line: Sequence[str] | None = None) -> int | None:
    """Processes that the launcher was asked for, by its command line or accelerate's config file; None: none to see.

    Args:
        command_line: of the launcher; None: of this process's parent.
    """
    words = list(command_line) if command_line is not None else _parent_command()
    index, launcher = next(((i, name) for i, word in enumerate(words[:4]) if (name := _launcher(word))), (0, None))
    if launcher is None:
        return None
    # What follows the script is the script's.
    after = words[index + 1 :]
    options = after[: next((i for i, word in enumerate(after) if word.endswith(".py")), None)]
    given = _option(options, _FLAGS)
    if given is None and launcher == "accelerate":
        return _configured_processes(options)
    return int(given) if given is not None and given.isdecimal() else None


def _launcher(word: str) -> str | None:
    """The name "accelerate" or "torch" for a word that starts one of them; its folder may have any name."""
    name = Path(word).name
    if name in ("accelerate", "accelerate-launch") or "accelerate.commands" in word or "accelerate/commands" in word:
        return "accelerate"
    is_torch = name == "torchrun" or "torch.distributed" in word or "torch/distributed" in word
    return "torch" if is_torch else None


def _option(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the first option of these names, "" where it has none; None: not given."""
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in names:
            return value or (words[index + 1] if index + 1 < len(words) else "")
    return None


def _configured_processes(options: Sequence[str]) -> int | None:
    """What the config file says that ``accelerate launch`` read for these options; None where it read none."""
    given = _option(options, _CONFIG_FLAGS)
    if given is None and "--cpu" in options:
        return None
    path = Path(given) if given is not None else Path(constants.HF_HOME, "accelerate", "default_config.yaml")
    # YAML or JSON; this package leaves the reading of it all to accelerate.
    found = _CONFIGURED.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return int(found[1]) if found is not None else None


def check_launch(num_running: int, asked: int | None = None) -> None:
    """Notice a launch that started fewer processes than asked for.

    Args:
        num_running: processes of this job.
        asked: how many there should be; None: what the launcher's command line or config file says.

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
