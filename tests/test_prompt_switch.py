"""Prompts that change on the way. H history (self K/V), text K/V: changing one must not touch the other by accident."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dense import relative_error
from tiny_components import (
    QUICK,
    TOKENS_PER_FRAME,
    committed_keys,
    failing,
    latents_of,
    pool_pages,
    random_embeds,
    record_forwards,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.pipelines import ARStream

MODES = ("text", "recache", "flush")
OLD, NEW = random_embeds(1), random_embeds(2)
ONE_STEP = QUICK.replace(denoising_steps=(1000,))


def stream_of(pipe: ARDiffusionPipeline, embeds: torch.Tensor = OLD, **call: Any) -> ARStream:
    return pipe.stream(prompt_embeds=embeds, **{"generator": seed(0), "output_type": "latent"} | call)


def take(stream: ARStream, count: int) -> torch.Tensor:
    return torch.cat([next(stream).latents for _ in range(count)], dim=2)


@contextmanager
def count_text_projections(pipe: ARDiffusionPipeline) -> Iterator[list[int]]:
    """Calls of each layer's text key projection."""
    calls = [0] * len(pipe.transformer.blocks)
    handles = []
    for layer, block in enumerate(pipe.transformer.blocks):

        def note(*_args: Any, layer: int = layer) -> None:
            calls[layer] += 1

        handles.append(block.attn2.to_k.register_forward_hook(note))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class TestTextKV:
    def test_computed_once_a_prompt_and_layer(self, pipe: ARDiffusionPipeline) -> None:
        with count_text_projections(pipe) as calls, stream_of(pipe) as stream:
            assert calls == [1, 1]
            take(stream, 3)
            assert calls == [1, 1], "eight forwards later"
            stream.switch_prompt(prompt_embeds=NEW)
            take(stream, 2)
            assert calls == [2, 2]

    def test_computed_once_a_branch(self, pipe: ARDiffusionPipeline) -> None:
        with (
            count_text_projections(pipe) as calls,
            stream_of(pipe, negative_prompt_embeds=NEW, guidance_scale=3.0) as stream,
        ):
            take(stream, 2)
        assert calls == [2, 2]

    def test_recache_projects_the_text_once(self, pipe: ARDiffusionPipeline) -> None:
        with count_text_projections(pipe) as calls, stream_of(pipe) as stream:
            take(stream, 2)
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            take(stream, 1)
        assert calls == [2, 2]

    @pytest.mark.parametrize("mode", MODES)
    def test_failure_in_layer_two_changes_nothing(
        self, pipe: ARDiffusionPipeline, manager: KVManager, mode: str
    ) -> None:
        """Text K/V were replaced layer by layer, so a failure left two prompts mixed."""
        plain = latents_of(pipe, None, prompt_embeds=OLD, num_frames=33)
        with stream_of(pipe, cache=manager) as stream:
            chunks = [take(stream, 2)]
            with failing(pipe.transformer.blocks[1].attn2.to_k, RuntimeError("lost")), pytest.raises(RuntimeError):
                stream.switch_prompt(prompt_embeds=NEW, mode=mode)
            chunks.append(take(stream, 1))
        assert torch.equal(torch.cat(chunks, dim=2), plain)

    def test_same_embeddings_object_with_other_values(self, pipe: ARDiffusionPipeline) -> None:
        """Text K/V were found again by the address of the embeddings, so new values in an old tensor were ignored."""
        embeds = OLD.clone()
        with stream_of(pipe, embeds) as stream, stream_of(pipe) as expected:
            take(stream, 1), take(expected, 1)
            embeds.copy_(NEW)
            stream.switch_prompt(prompt_embeds=embeds)
            expected.switch_prompt(prompt_embeds=NEW)
            assert torch.equal(take(stream, 1), take(expected, 1))


class TestText:
    """Mode "text": only the text changes."""

    def test_changes_the_next_chunk_and_no_page(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """Every prompt change reset the history."""
        plain = latents_of(pipe, None, prompt_embeds=OLD, num_frames=33)
        with stream_of(pipe, cache=manager) as stream:
            first = take(stream, 2)
            pages, before = pool_pages(manager), committed_keys(manager, 1, range(3))
            stream.switch_prompt(prompt_embeds=NEW)
            assert pool_pages(manager) == pages
            assert torch.equal(committed_keys(manager, 1, range(3)), before)
            assert manager.sessions[0].branch().committed_tokens == 6 * TOKENS_PER_FRAME
            third = take(stream, 1)
        assert torch.equal(first, plain[:, :, :6])
        assert relative_error(third, plain[:, :, 6:]) > 1e-2

    def test_deferred_commit_uses_the_old_text(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """A commit that was due ran after the switch, so the last chunk entered the history under the new prompt."""
        keys = []
        for switched in (False, True):
            with stream_of(pipe, cache=manager) as stream:
                take(stream, 1)
                if switched:
                    stream.switch_prompt(prompt_embeds=NEW)
                take(stream, 1)
                keys.append(committed_keys(manager, 1, range(3)))
        assert torch.equal(*keys)
        under_new_text = self.keys_of_context(pipe, manager, latents_of(pipe, None, prompt_embeds=OLD)[:, :, :3])
        assert relative_error(keys[1], under_new_text) > 1e-3

    @staticmethod
    def keys_of_context(pipe: ARDiffusionPipeline, manager: KVManager, latents: torch.Tensor) -> torch.Tensor:
        """Layer 2's keys of these latents, committed under the new text."""
        with stream_of(pipe, NEW, context_latents=latents, cache=manager) as stream:
            take(stream, 2)
            return committed_keys(manager, 1, range(3))

    def test_last_of_two_switches_wins(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, stream_of(pipe) as expected:
            take(stream, 1), take(expected, 1)
            for embeds in (random_embeds(8), NEW):
                stream.switch_prompt(prompt_embeds=embeds)
            expected.switch_prompt(prompt_embeds=NEW)
            assert torch.equal(take(stream, 2), take(expected, 2))

    def test_blend_over_four_chunks_resets_nothing(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """Each step of a blend dropped the whole history."""
        with stream_of(pipe, cache=manager) as stream:
            take(stream, 1)
            pages = pool_pages(manager)
            for step in range(1, 5):
                stream.switch_prompt(prompt_embeds=torch.lerp(OLD, NEW, step / 4))
                take(stream, 1)
                assert manager.sessions[0].branch().committed_tokens == 3 * step * TOKENS_PER_FRAME
            assert pool_pages(manager) == pages


class TestRecache:
    def test_window_is_rewritten_at_the_same_positions(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """The text was refreshed, but the history still followed the old prompt."""
        history = latents_of(pipe, None, prompt_embeds=OLD)
        with stream_of(pipe, cache=manager) as stream:
            assert torch.equal(take(stream, 2), history)
            pages = pool_pages(manager)
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert pool_pages(manager) == pages
            assert manager.sessions[0].branch().committed_tokens == 6 * TOKENS_PER_FRAME
            recached = committed_keys(manager, 1, range(6))
        # Six frames are all that sink and window hold, so one forward over them under the new text is the same.
        with stream_of(
            pipe,
            NEW,
            context_latents=history,
            recipe=QUICK.replace(chunk_frames=6, num_window_frames=6, num_sink_frames=0),
        ) as stream:
            take(stream, 1)
            stream.rollout.commit_held()
            branch = stream.rollout.sessions[0].branch()
            expected = branch.storage.key_pools[1][branch.storage.slots(torch.arange(36), branch.run)]
        assert relative_error(recached, expected) < 1e-5

    def test_rewrites_what_the_window_shows_after_the_wrap(
        self, pipe: ARDiffusionPipeline, manager: KVManager
    ) -> None:
        with stream_of(pipe, cache=manager) as stream, record_forwards(pipe.transformer) as forwards:
            history = take(stream, 4)
            keys = self.keys(manager)
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert torch.equal(forwards.inputs[-1], history[:, :, 7:12]), "the window's five frames, not the sink"
            assert forwards.timesteps[-1] == 0.0
            sink, window = (self.keys(manager) != keys).flatten(1).any(1).split([6, 30])
        assert not sink.any() and window.all()

    @staticmethod
    def keys(manager: KVManager) -> torch.Tensor:
        return committed_keys(manager, 1, range(6))

    def test_differs_from_a_change_of_text(self, pipe: ARDiffusionPipeline) -> None:
        chunks = {}
        for mode in MODES:
            with stream_of(pipe) as stream:
                take(stream, 2)
                stream.switch_prompt(prompt_embeds=NEW, mode=mode)
                chunks[mode] = take(stream, 1)
        assert relative_error(chunks["recache"], chunks["text"]) > 1e-4
        assert relative_error(chunks["flush"], chunks["text"]) > 1e-4

    def test_failed_recache_is_healed_by_the_same_switch(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        with stream_of(pipe) as stream:
            take(stream, 2)
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            expected = take(stream, 1)
        with stream_of(pipe, cache=manager) as stream:
            take(stream, 2)
            with failing(pipe.transformer.blocks[1], RuntimeError("lost"), after=1), pytest.raises(RuntimeError):
                stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            branch = manager.sessions[0].branch()
            assert branch.ring.stale and not stream.closed
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert not branch.ring.stale
            assert torch.equal(take(stream, 1), expected)

    @pytest.mark.parametrize("use", ["next", "flush"])
    def test_stale_history_is_refused(self, pipe: ARDiffusionPipeline, manager: KVManager, use: str) -> None:
        with stream_of(pipe, cache=manager) as stream:
            take(stream, 2)
            with failing(pipe.transformer.blocks[1], RuntimeError("lost"), after=1), pytest.raises(RuntimeError):
                stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            with pytest.raises(RuntimeError, match="stale"):
                if use == "next":
                    next(stream)
                else:
                    stream.switch_prompt(prompt_embeds=NEW, mode="flush", keep_frames=2)
        assert manager.allocator.num_used == 0

    def test_stale_history_is_healed_by_a_reset(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            take(stream, 2)
            with failing(pipe.transformer.blocks[1], RuntimeError("lost"), after=1), pytest.raises(RuntimeError):
                stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            stream.reset()
            assert take(stream, 1).isfinite().all()

    def test_both_branches(self, pipe: ARDiffusionPipeline) -> None:
        """Only the branches that get a new text are rewritten."""
        manager = pipe.create_cache(guided=True)
        call = {"negative_prompt_embeds": random_embeds(5), "guidance_scale": 3.0, "cache": manager}
        with stream_of(pipe, **call) as stream:
            take(stream, 2)
            stream.rollout.commit_held()
            before = [committed_keys(manager, 1, range(6), name) for name in ("positive", "negative")]
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
            after = [committed_keys(manager, 1, range(6), name) for name in ("positive", "negative")]
            assert not torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
            stream.switch_prompt(prompt_embeds=NEW, negative_prompt_embeds=random_embeds(6), mode="recache")
            last = [committed_keys(manager, 1, range(6), name) for name in ("positive", "negative")]
            assert torch.equal(last[0], after[0]) and not torch.equal(last[1], after[1])


class TestFlush:
    @pytest.mark.parametrize(("keep_frames", "kept"), [(0, []), (1, [5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
    def test_sink_and_the_last_frames_stay(
        self, pipe: ARDiffusionPipeline, manager: KVManager, keep_frames: int, kept: list[int]
    ) -> None:
        """The next chunk reads the sink, the frames kept and itself; NaN everywhere else goes unnoticed."""
        with stream_of(pipe, cache=manager) as stream:
            take(stream, 2)
            stream.rollout.commit_held()
            before = {frame: committed_keys(manager, 1, [frame]) for frame in (0, *kept)}
            stream.switch_prompt(prompt_embeds=OLD, mode="flush", keep_frames=keep_frames)
            for place, frame in enumerate((0, *kept)):
                assert torch.equal(committed_keys(manager, 1, [place]), before[frame])
            self.poison_behind(manager, 1 + len(kept))
            chunk = next(stream)
        assert chunk.start_latent_frame == 6, "positions go on"
        assert chunk.latents.isfinite().all()

    @staticmethod
    def poison_behind(manager: KVManager, num_frames: int) -> None:
        run = manager.sessions[0].branch().run
        slots = manager.storage.slots(torch.arange(num_frames * TOKENS_PER_FRAME, 36), run)
        for pool in (*manager.storage.key_pools, *manager.storage.value_pools):
            pool[slots] = float("nan")

    def test_fewer_frames_kept_is_another_chunk(self, pipe: ARDiffusionPipeline) -> None:
        chunks = []
        for keep_frames in (0, 1, 3):
            with stream_of(pipe) as stream:
                take(stream, 2)
                stream.switch_prompt(prompt_embeds=OLD, mode="flush", keep_frames=keep_frames)
                chunks.append(take(stream, 1))
        assert relative_error(chunks[1], chunks[0]) > 1e-4 and relative_error(chunks[2], chunks[1]) > 1e-4

    def test_keeping_all_is_a_change_of_text(self, pipe: ARDiffusionPipeline) -> None:
        chunks = []
        for options in ({"mode": "text"}, {"mode": "flush", "keep_frames": 5}):
            with stream_of(pipe) as stream:
                take(stream, 2)
                stream.switch_prompt(prompt_embeds=NEW, **options)
                chunks.append(take(stream, 2))
        torch.testing.assert_close(*chunks, rtol=0, atol=1e-5)


class TestTiming:
    @pytest.mark.parametrize("mode", MODES)
    def test_switch_before_any_chunk(self, pipe: ARDiffusionPipeline, mode: str) -> None:
        """A prompt that was changed before the first chunk was lost."""
        with stream_of(pipe) as stream, stream_of(pipe, NEW) as expected:
            stream.switch_prompt(prompt_embeds=NEW, mode=mode)
            assert torch.equal(take(stream, 2), take(expected, 2))

    @pytest.mark.parametrize("mode", MODES)
    def test_reset_keeps_the_latest_prompt(self, pipe: ARDiffusionPipeline, mode: str) -> None:
        """A reset brought back the first prompt."""
        call = {"latents": torch.randn(1, 16, 9, 4, 6, generator=seed(1)), "recipe": ONE_STEP}
        with stream_of(pipe, **call) as stream, stream_of(pipe, NEW, **call) as expected:
            take(stream, 2)
            stream.switch_prompt(prompt_embeds=NEW, mode=mode)
            stream.reset()
            assert torch.equal(take(stream, 2), take(expected, 2))

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("latent_frame", [4, 6], ids=["inside a chunk", "at its edge"])
    def test_schedule_is_a_switch_at_the_next_chunk(
        self, pipe: ARDiffusionPipeline, mode: str, latent_frame: int
    ) -> None:
        schedule = [PromptSwitch(latent_frame=latent_frame, prompt_embeds=NEW, mode=mode)]
        scheduled = latents_of(pipe, None, prompt_embeds=OLD, num_frames=45, prompt_schedule=schedule)
        with stream_of(pipe) as stream:
            first = take(stream, 2)
            stream.switch_prompt(prompt_embeds=NEW, mode=mode)
            assert torch.equal(scheduled, torch.cat([first, take(stream, 2)], dim=2))

    def test_schedule_in_any_order_of_words(self, pipe: ARDiffusionPipeline) -> None:
        schedule = [
            PromptSwitch(latent_frame=6, prompt="green square", mode="flush", keep_frames=2),
            PromptSwitch(latent_frame=3, prompt=["blue circle"], mode="recache"),
        ]
        scheduled = latents_of(pipe, num_frames=33, prompt_schedule=schedule)
        with pipe.stream("a red circle moving right", generator=seed(0), output_type="latent") as stream:
            chunks = [take(stream, 1)]
            stream.switch_prompt("blue circle", mode="recache")
            chunks.append(take(stream, 1))
            stream.switch_prompt("green square", mode="flush", keep_frames=2)
            chunks.append(take(stream, 1))
        assert torch.equal(scheduled, torch.cat(chunks, dim=2))

    def test_given_frames_count(self, pipe: ARDiffusionPipeline) -> None:
        """Frames of a switch are absolute: an image is frame 0, the first chunk generated starts at 1."""
        call = {"context_latents": torch.randn(1, 16, 1, 4, 6, generator=seed(3)), "num_frames": 25}
        plain = latents_of(pipe, None, prompt_embeds=OLD, **call)
        switched = [
            latents_of(
                pipe,
                None,
                prompt_embeds=OLD,
                prompt_schedule=[PromptSwitch(latent_frame=frame, prompt_embeds=NEW)],
                **call,
            )
            for frame in (1, 2)
        ]
        assert not torch.equal(switched[0][:, :, 1:4], plain[:, :, 1:4])
        assert torch.equal(switched[1][:, :, :4], plain[:, :, :4])
        assert not torch.equal(switched[1][:, :, 4:], plain[:, :, 4:])

    def test_embeds_for_several_videos(self, pipe: ARDiffusionPipeline) -> None:
        """One new prompt serves all videos, or each gets its own."""
        shared, own = (
            latents_of(
                pipe,
                None,
                prompt_embeds=random_embeds(1, rows=2),
                generator=[seed(0), seed(1)],
                prompt_schedule=[PromptSwitch(latent_frame=3, prompt_embeds=embeds)],
            )
            for embeds in (NEW, torch.cat([NEW, OLD]))
        )
        assert torch.equal(shared[0], own[0]) and not torch.equal(shared[1], own[1])


class TestBadSwitches:
    @pytest.mark.parametrize(
        ("switch", "message"),
        [
            ({"mode": "reset"}, r"unknown prompt switch mode 'reset'; known: \['text', 'recache', 'flush', 'blend'\]"),
            ({"keep_frames": 2}, "keep_frames=2 only goes with mode 'flush'"),
            ({"mode": "flush", "keep_frames": -1}, "keep_frames must be a whole number >= 0"),
            ({"prompt": "blue"}, "exactly one of them|either"),
            ({"prompt_embeds": None}, "exactly one of them|either"),
        ],
        ids=["mode", "keep_frames", "negative", "both", "none"],
    )
    def test_refused_alike(self, pipe: ARDiffusionPipeline, switch: dict[str, Any], message: str) -> None:
        arguments = {"prompt_embeds": NEW} | switch
        plain = latents_of(pipe, None, prompt_embeds=OLD)
        with stream_of(pipe) as stream:
            first = take(stream, 1)
            with pytest.raises(ValueError, match=message):
                stream.switch_prompt(**arguments)
            assert torch.equal(torch.cat([first, take(stream, 1)], dim=2), plain), "nothing has changed"
        with pytest.raises(ValueError, match=message):
            PromptSwitch(latent_frame=0, **arguments)

    @pytest.mark.parametrize("frame", [-1, 1.5, None])
    def test_frames(self, frame: Any) -> None:
        with pytest.raises(ValueError, match="latent_frame must be a whole number >= 0"):
            PromptSwitch(latent_frame=frame, prompt="blue")

    def test_negative_prompt_without_guidance(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            first = take(stream, 1)
            with pytest.raises(ValueError, match="runs without guidance"):
                stream.switch_prompt(prompt_embeds=NEW, negative_prompt_embeds=NEW)
            assert torch.equal(torch.cat([first, take(stream, 1)], dim=2), latents_of(pipe, None, prompt_embeds=OLD))

    def test_schedule_is_checked_before_anything_runs(self, pipe: ARDiffusionPipeline) -> None:
        """A schedule with two prompts for three videos failed only when its frame came."""
        switch = PromptSwitch(latent_frame=60, prompt=["a", "b"])
        with record_forwards(pipe.transformer) as forwards:
            with pytest.raises(ValueError, match=r"switch at latent frame 60 has 2 prompts for 3 videos"):
                pipe(["a", "b", "c"], prompt_schedule=[switch])
            with pytest.raises(ValueError, match="PromptSwitch objects, got"):
                pipe("a", prompt_schedule=[(3, "blue")])
        assert len(forwards) == 0
