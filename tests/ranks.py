"""Work on several gloo processes, forked from this one so that nothing has to be imported again."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 180.0


def run_ranks(num_ranks: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(rank, *args)`` in each process; returns what each returned, first to last.

    Raises:
        AssertionError: a process raised (with all tracebacks), died, or did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{time.monotonic_ns()}"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_enter, args=(rank, num_ranks, store, work, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    failed = "\n".join(path.read_text() for path in sorted(folder.glob(f"{store.name}-*.error")))
    codes = [process.exitcode for process in processes]
    assert not late and codes == [0] * num_ranks, f"exit codes {codes}, {len(late)} too late\n{failed}"
    return [torch.load(f"{store}-{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _enter(rank: int, num_ranks: int, store: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=DEADLINE),
        )
        torch.save(work(rank, *args), f"{store}-{rank}.pt")
        code = 0
    except BaseException:
        Path(f"{store}-{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        # Without the exit handlers of the process this one was forked from.
        os._exit(code)
