"""Forwards that only write: the last layer's attention is left out, and what is written is the same bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from counting import CountingBackend
from live_streams import NEW, stream_of, take
from recorders import replays, warm_up
from rollouts import make_manager, pool_bytes, random_rows
from tiny_components import QUICK, make_pipeline

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.attention import get_backend, paged_write_attn, registry
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.launch import WritePass
from diffusers_ardiff.merged import MergedForwardContext

LAYERS = 3


@contextmanager
def attended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers that a backend attends in, one after the other."""
    layers: list[int] = []
    plain = get_backend("sdpa")

    def attend(query, inputs, plan, softmax_scale):
        layers.append(int(inputs.layer_index))
        return plain.attend(query, inputs, plan, softmax_scale)

    with monkeypatch.context() as patch:
        patch.setitem(registry._backends, "sdpa", replace(plain, attend=attend, rank=0))
        yield layers


def run_layers(context: PagedForwardContext, order: list[int], seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    rows = random_rows(context.branches, 24)
    return [paged_write_attn(context.layer_inputs(layer), *rows) for layer in order]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_layer_that_writes_last_does_not_attend(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> None:
    """In whatever order layers run (those of VACE run before all others, and are the last of the pool); a second pass of
    the same forward begins anew."""
    pools, calls = [], []
    for only_writes in (False, True):
        branches = make_manager(24, 72, layers=LAYERS).open_session().branches
        context = PagedForwardContext(branches, num_tokens=24)
        with attended(monkeypatch) as layers, context.write_only() if only_writes else context:
            outs = run_layers(context, order)
            outs += run_layers(context, order)
        context.mark_committed()
        assert [bool(out.any()) for out in outs] == [True, True, not only_writes] * 2
        pools.append(pool_bytes(context.storage))
        calls.append(layers)
    assert calls == [order * 2, order[:2] * 2]
    assert torch.equal(*pools)


def test_own_forwards_attend_unless_they_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = make_manager(24, 72, layers=LAYERS).open_session().branches
    with attended(monkeypatch) as layers:
        for _ in range(2):
            with PagedForwardContext(branches, num_tokens=24) as context:
                assert all(out.any() for out in run_layers(context, [0, 1, 2]))
            context.mark_committed()
    assert layers == [0, 1, 2] * 2


def test_refusals() -> None:
    branches = make_manager(24, 72, layers=LAYERS).open_session().branches
    with PagedForwardContext(branches, num_tokens=24) as context:
        with pytest.raises(RuntimeError, match="before prepare"):
            context.write_only()
        run_layers(context, [0, 1, 2])
    with pytest.raises(RuntimeError, match="output is read"):
        MergedForwardContext(branches, num_tokens=24).write_only()


def layers_of_stream(
    monkeypatch: pytest.MonkeyPatch, pipe: ARDiffusionPipeline, **call
) -> tuple[list[int], torch.Tensor]:
    with stream_of(pipe, **call) as stream, attended(monkeypatch) as layers:
        latents = take(stream, 2)
        stream.switch_prompt(prompt_embeds=NEW, mode="recache")
        return layers, torch.cat([latents, take(stream, 3)], dim=2)


@pytest.mark.parametrize("is_warm", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_streams_are_the_same_without_it(monkeypatch: pytest.MonkeyPatch, is_warm: bool, compiled: bool) -> None:
    """Commits and the recache attend in one layer less than the other forwards; latents are equal bit by bit, and
    compiled blocks stay one graph."""
    pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
    num_layers = pipe.transformer.config.num_layers
    if is_warm:
        warm_up(pipe, compile={"backend": counting} if compiled else False, recache=True)
    elif compiled:
        pipe.warmup(compile={"backend": counting}, cuda_graphs=False)
    num_graphs = len(counting.graphs)
    layers, latents = layers_of_stream(monkeypatch, pipe)
    assert len(counting.graphs) == num_graphs
    with monkeypatch.context() as patch:
        patch.setattr(WritePass, "ends_with", lambda *args: False)
        plain_layers, expected = layers_of_stream(monkeypatch, make_pipeline(QUICK))
    assert torch.equal(latents, expected)
    num_writes = 4 + 1
    assert len(plain_layers) == (2 * 5 + num_writes) * num_layers
    # Replayed forwards keep the backend of their warm-up.
    assert is_warm or [plain_layers.count(i) - layers.count(i) for i in range(num_layers)] == [
        *[0] * (num_layers - 1),
        num_writes,
    ]
    assert not is_warm or replays(pipe) == 2 * 5 + num_writes


def test_merged_forwards_attend_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline(QUICK)
    with stream_of(pipe, merge_commits=True) as stream, attended(monkeypatch) as layers:
        take(stream, 3)
    # Two forwards a chunk, of which two have two halves.
    num_layers = pipe.transformer.config.num_layers
    assert layers.count(num_layers - 1) == layers.count(0) == 2 * 3 + 2


def test_a_commit_replays_a_denoise_forward_where_it_was_not_captured_itself() -> None:
    """After a warm-up of merged forwards, whose commits alone are those before a prompt switch."""
    pipe = make_pipeline(QUICK)
    warm_up(pipe, merge_commits=True)
    with stream_of(pipe, merge_commits=True) as stream:
        take(stream, 3)
        before = replays(pipe)
        stream.rollout.commit_held()
        assert replays(pipe) == before + 1
