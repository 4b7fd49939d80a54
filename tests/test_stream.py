"""Streams: chunks as they are ready, memory back however they end, flat cost for ever, several in one pool."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_components import (
    PROMPT,
    QUICK,
    RECIPE,
    TOKENS_PER_FRAME,
    failing,
    host_state,
    latents_of,
    make_pipeline,
    pool_pages,
    record_forwards,
    record_pools,
    seed,
)

from diffusers_ardiff import ARChunk, ARDiffusionPipeline, CacheOptions, PromptSwitch
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.pipelines import ARStream


def stream_of(pipe: ARDiffusionPipeline, prompt: str | list[str] = PROMPT, **call: Any) -> ARStream:
    """A latent stream from seed 0 unless told otherwise."""
    return pipe.stream(prompt, **{"generator": seed(0), "output_type": "latent"} | call)


def take(stream: ARStream, count: int) -> list[ARChunk]:
    return [next(stream) for _ in range(count)]


class TestChunks:
    def test_frames_of_the_chunks(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, output_type="np") as stream:
            chunks = take(stream, 4)
        assert [chunk.frames.shape for chunk in chunks] == [(1, n, 32, 48, 3) for n in (9, 12, 12, 12)]
        assert [(chunk.index, chunk.start_latent_frame, chunk.is_given) for chunk in chunks] == [
            (0, 0, False),
            (1, 3, False),
            (2, 6, False),
            (3, 9, False),
        ]

    def test_handed_out_before_its_commit(self, pipe: ARDiffusionPipeline) -> None:
        """Every chunk is ready before the next begins, and before the forward that only the next one needs."""
        with record_forwards(pipe.transformer) as forwards, stream_of(pipe, recipe=RECIPE) as stream:
            assert len(forwards) == 0
            for expected in (4, 4 + 5, 4 + 5 + 5):
                next(stream)
                assert len(forwards) == expected
            assert [index for index, timestep in enumerate(forwards.timesteps) if timestep == 0] == [4, 9]

    def test_last_chunk_needs_no_commit(self, pipe: ARDiffusionPipeline) -> None:
        with record_forwards(pipe.transformer) as forwards:
            assert len(list(stream_of(pipe, recipe=RECIPE, num_frames=21))) == 2
        assert len(forwards) == 4 + 1 + 4

    @pytest.mark.parametrize("output_type", ["np", "pt", "pil", "latent"])
    def test_joined_chunks_are_the_call(self, pipe: ARDiffusionPipeline, output_type: str) -> None:
        call = {"num_frames": 31, "output_type": output_type}
        whole = pipe(PROMPT, generator=seed(0), **call).frames
        chunks = [chunk.frames for chunk in stream_of(pipe, **call)]
        if output_type == "pil":
            joined = [image for chunk in chunks for image in chunk[0]]
            assert len(joined) == 31 and all(isinstance(image, Image.Image) for image in joined)
            assert [image.tobytes() for image in joined] == [image.tobytes() for image in whole[0]]
        elif output_type == "np":
            assert np.array_equal(np.concatenate(chunks, axis=1), whole)
        else:
            assert torch.equal(torch.cat(chunks, dim=1 if output_type == "pt" else 2), whole)

    def test_endless_stream_begins_like_a_bounded_one(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            chunks = take(stream, 9)
        whole = latents_of(pipe, num_frames=69)
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks[:6]], dim=2), whole)

    def test_given_image_is_the_first_chunk(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, image=torch.rand(1, 3, 32, 48), output_type="pt") as stream:
            chunks = take(stream, 3)
        assert [(chunk.is_given, chunk.frames.shape[1]) for chunk in chunks] == [(True, 1), (False, 12), (False, 12)]

    def test_chunk_edited_by_its_owner(self, pipe: ARDiffusionPipeline) -> None:
        """A chunk's latents were the very tensor whose commit was still due, so scaling them changed the future."""
        plain = latents_of(pipe)
        with stream_of(pipe) as stream:
            next(stream).latents.mul_(10)
            assert torch.equal(next(stream).latents, plain[:, :, 3:])

    def test_given_noise_ends(self, pipe: ARDiffusionPipeline) -> None:
        stream = stream_of(pipe, latents=torch.randn(1, 16, 4, 4, 6))
        next(stream)
        with pytest.raises(ValueError, match="holds noise for 4 frames, the next chunk needs frames 3 to 5"):
            next(stream)
        assert stream.closed


class TestEnd:
    """However a stream ends, pages and pool are free and the transformer is as it was found."""

    @pytest.fixture
    def pipe(self) -> ARDiffusionPipeline:
        return make_pipeline(QUICK)

    def stop_by_close(self, stream: ARStream) -> None:
        stream.close()
        stream.close()
        assert list(stream) == []

    def stop_by_with(self, stream: ARStream) -> None:
        with stream:
            next(stream)

    def stop_by_dropping(self, stream: ARStream) -> None:
        del stream

    def stop_by_error(self, stream: ARStream) -> None:
        with failing(stream._pipeline.transformer.blocks[1], KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            next(stream)
        assert stream.closed

    @pytest.mark.parametrize("how", ["close", "with", "dropping", "error"])
    @pytest.mark.parametrize("num_chunks", [0, 3])
    def test_pages_come_back(self, pipe: ARDiffusionPipeline, how: str, num_chunks: int) -> None:
        """A stream that was dropped half-way lived on in the pipeline, with its pages and its pool."""
        found = host_state(pipe.transformer)
        manager = pipe.create_cache(guided=True)
        streams = [stream_of(pipe, guidance_scale=3.0, cache=manager)]
        take(streams[0], num_chunks)
        assert manager.allocator.num_used == manager.allocator.num_pages
        getattr(self, f"stop_by_{how}")(streams.pop())
        gc.collect()
        assert manager.allocator.num_used == 0 and manager.sessions == ()
        manager.check_integrity()
        assert host_state(pipe.transformer) == found

    @pytest.mark.parametrize("how", ["close", "with", "dropping", "error"])
    def test_pool_is_collected(self, pipe: ARDiffusionPipeline, how: str) -> None:
        with record_pools() as pools:
            streams = [stream_of(pipe)]
            take(streams[0], 2)
            assert pools[0]() is not None
            getattr(self, f"stop_by_{how}")(streams.pop())
        gc.collect()
        assert [ref() for ref in pools] == [None]

    def test_closed_stream_that_is_kept_keeps_no_pool(self, pipe: ARDiffusionPipeline) -> None:
        with record_pools() as pools:
            stream = stream_of(pipe, num_frames=21)
            assert len(list(stream)) == 2 and stream.closed
        gc.collect()
        assert [ref() for ref in pools] == [None]
        assert stream.vae_state_bytes == 0

    def test_host_is_as_found_between_chunks(self, pipe: ARDiffusionPipeline) -> None:
        """The host's own pipeline can run between two chunks, and changes nothing."""
        plain = latents_of(pipe, num_frames=33)
        found = host_state(pipe.transformer)
        x, t = torch.randn(1, 16, 2, 4, 6), torch.tensor([500.0])
        with torch.no_grad(), stream_of(pipe) as stream:
            before = pipe.transformer(x, t, torch.ones(1, 4, 32), return_dict=False)[0]
            chunks = []
            for _ in range(3):
                chunks.append(next(stream).latents)
                assert host_state(pipe.transformer) == found
                assert torch.equal(pipe.transformer(x, t, torch.ones(1, 4, 32), return_dict=False)[0], before)
        assert torch.equal(torch.cat(chunks, dim=2), plain)

    @pytest.mark.parametrize("output_type", ["latent", "pt"])
    def test_opened_in_inference_mode(self, pipe: ARDiffusionPipeline, output_type: str) -> None:
        """Its pool could be written in that mode only: the first chunk outside failed with an in-place update."""
        with torch.inference_mode():
            stream = stream_of(pipe, num_frames=33, output_type=output_type)
            frames = [next(stream).frames]
        frames += [chunk.frames for chunk in stream]
        expected = pipe(PROMPT, num_frames=33, generator=seed(0), output_type=output_type).frames
        assert torch.equal(torch.cat(frames, dim=2 if output_type == "latent" else 1), expected)

    def test_closed_by_a_callback(self, pipe: ARDiffusionPipeline) -> None:
        manager = pipe.create_cache()
        stream = stream_of(pipe, cache=manager, callback_on_step_end=lambda *_args: stream.close())
        assert list(stream) == []
        assert manager.allocator.num_used == 0

    @pytest.mark.parametrize("last_step", [0, 1])
    def test_closed_by_a_callback_ends_without_a_chunk(self, pipe: ARDiffusionPipeline, last_step: int) -> None:
        """Closed in a chunk's last step, a pixel stream handed out latents as the chunk's frames."""

        def close(_pipe: Any, step: int, *_args: Any) -> None:
            if step == 2 + last_step:
                stream.close()

        stream = stream_of(pipe, output_type="np", callback_on_step_end=close)
        assert [chunk.frames.shape for chunk in stream] == [(1, 9, 32, 48, 3)]

    def test_stop_iteration_of_user_code_is_no_end(self, pipe: ARDiffusionPipeline) -> None:
        """An iterator of noise that was too short silently gave a shorter video."""
        noise = iter([torch.zeros(1, 16, 3, 4, 6)])
        with record_pools() as pools, pytest.raises(RuntimeError, match="raised StopIteration before the video's end"):
            pipe(PROMPT, num_frames=21, step_noise=lambda *_args: next(noise))
        gc.collect()
        assert [pool() for pool in pools] == [None]

    def test_vae_that_cannot_stream_takes_no_pages(self, pipe: ARDiffusionPipeline) -> None:
        """A tiled VAE was refused after the sessions had been opened, and their pages stayed taken."""
        manager = pipe.create_cache()
        pipe.vae.enable_tiling()
        with pytest.raises(NotImplementedError, match="tiled VAE"):
            pipe.stream(PROMPT, cache=manager)
        assert manager.allocator.num_used == 0

    def test_text_that_does_not_fit_takes_no_pages(self, pipe: ARDiffusionPipeline) -> None:
        """Embeddings of another width were refused in the text embedder, after the pages had been taken."""
        manager = pipe.create_cache()
        with pytest.raises(ValueError, match=r"must be \(prompts, text_len, 32\) for this transformer"):
            pipe.stream(prompt_embeds=torch.randn(1, 12, 31), cache=manager)
        assert manager.allocator.num_used == 0

    def test_use_after_the_end(self, pipe: ARDiffusionPipeline) -> None:
        stream = stream_of(pipe)
        stream.close()
        for use in (lambda: stream.switch_prompt("blue"), stream.reset):
            with pytest.raises(RuntimeError, match="this stream is closed; start a new one"):
                use()


class TestSharedPool:
    def test_interleaved_streams_equal_streams_alone(self, pipe: ARDiffusionPipeline) -> None:
        """Two viewers in one pool: A0 B0 A1 A2 B1 A3, each bit by bit as if alone."""
        alone = [latents_of(pipe, prompt, num_frames=45, generator=seed(s)) for prompt, s in self.VIEWERS]
        manager = pipe.create_cache(num_videos=2)
        streams = [stream_of(pipe, prompt, generator=seed(s), cache=manager) for prompt, s in self.VIEWERS]
        chunks: list[list[torch.Tensor]] = [[], []]
        for viewer in (0, 1, 0, 0, 1, 0):
            chunks[viewer].append(next(streams[viewer]).latents)
        for have, want in zip(chunks, alone, strict=True):
            joined = torch.cat(have, dim=2)
            assert torch.equal(joined, want[:, :, : joined.shape[2]])
        streams[1].close()
        assert manager.allocator.num_used == manager.allocator.num_pages // 2
        assert torch.equal(torch.cat([*chunks[0], next(streams[0]).latents], dim=2)[:, :, :12], alone[0])
        streams[0].close()

    VIEWERS = ((PROMPT, 0), ("blue square moving left", 7))

    def test_pool_is_full(self, pipe: ARDiffusionPipeline) -> None:
        manager = pipe.create_cache()
        with stream_of(pipe, cache=manager), pytest.raises(RuntimeError, match="pages"):
            stream_of(pipe, cache=manager)
        with stream_of(pipe, cache=manager) as stream:
            next(stream)

    def test_too_many_videos_take_no_pages(self, pipe: ARDiffusionPipeline) -> None:
        manager = pipe.create_cache()
        with pytest.raises(RuntimeError, match="pages"):
            pipe.stream([PROMPT, PROMPT], cache=manager)
        assert manager.allocator.num_used == 0

    @pytest.mark.parametrize(
        "call",
        [{"height": 64}, {"recipe": QUICK.replace(num_window_frames=6)}, {"recipe": QUICK.replace(num_sink_frames=0)}],
        ids=["height", "window", "sink"],
    )
    def test_pool_of_another_layout(self, pipe: ARDiffusionPipeline, call: dict[str, Any]) -> None:
        manager = pipe.create_cache()
        with pytest.raises(ValueError, match=r"the given cache holds .*pipe\.create_cache"):
            stream_of(pipe, cache=manager, **call)

    def test_text_of_the_sessions_is_what_forwards_read(self, pipe: ARDiffusionPipeline) -> None:
        """Forwards read a second copy of the text, so another one given to a session had no effect."""
        prompts = [PROMPT, "blue square moving left"]
        want = latents_of(pipe, prompts, num_frames=9, generator=[seed(0), seed(7)])
        streams = (stream_of(pipe, [PROMPT, PROMPT], generator=[seed(0), seed(7)]), stream_of(pipe, prompts[1]))
        with streams[0] as stream, streams[1] as other:
            stream.rollout.sessions[1].branch().text = other.rollout.sessions[0].branch().text
            assert torch.equal(next(stream).latents, want)

    def test_freed_pages_hold_no_secrets(self, pipe: ARDiffusionPipeline) -> None:
        """Pages come back dirty; a pool full of NaN gives the same bits as a fresh one."""
        manager = pipe.create_cache()
        manager.storage.fill_(float("nan"))
        assert torch.equal(latents_of(pipe, cache=manager), latents_of(pipe))

    @pytest.mark.parametrize("options", [{"shuffle_seed": 3}, {"page_size": 64}], ids=lambda o: next(iter(o)))
    def test_pages_do_not_matter(self, pipe: ARDiffusionPipeline, options: dict[str, int]) -> None:
        other = latents_of(pipe, num_frames=45, cache=CacheOptions(**options))
        torch.testing.assert_close(other, latents_of(pipe, num_frames=45), rtol=0, atol=1e-5)


class TestReset:
    def test_default_starts_over_with_the_text(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, output_type="pt") as stream:
            take(stream, 2)
            pages = [branch.run.pages for branch in stream.rollout.sessions[0].branches]
            stream.reset()
            assert stream.vae_state_bytes == 0
            again = take(stream, 2)
            assert [branch.run.pages for branch in stream.rollout.sessions[0].branches] == pages
        assert [(chunk.index, chunk.frames.shape[1]) for chunk in again] == [(0, 9), (1, 12)]

    def test_reset_gives_the_same_bits_from_the_same_noise(self, pipe: ARDiffusionPipeline) -> None:
        recipe = QUICK.replace(denoising_steps=(1000,))
        with stream_of(pipe, output_type="pt", latents=self.noise(), recipe=recipe) as stream:
            first = take(stream, 2)
            stream.reset()
            again = take(stream, 2)
        for chunk, other in zip(first, again, strict=True):
            assert torch.equal(chunk.latents, other.latents) and torch.equal(chunk.frames, other.frames)

    def test_reset_begins_the_whole_call_again(self, pipe: ARDiffusionPipeline) -> None:
        """Given frames and prompt switches were used up by the first video, and the steps counted on."""
        steps: list[int] = []
        call = {
            "image": Image.new("RGB", (48, 32), "red"),
            "prompt_schedule": [PromptSwitch(latent_frame=4, prompt="blue square", mode="recache")],
            "callback_on_step_end": lambda _pipe, step, *_args: steps.append(step),
            "latents": self.noise()[:, :, :6],
            "recipe": QUICK.replace(denoising_steps=(1000,)),
            "num_frames": 25,
        }
        with stream_of(pipe, output_type="pt", **call) as stream:
            first = take(stream, 3)
            stream.reset()
            stream.switch_prompt(PROMPT)
            again = list(stream)
        assert steps == [0, 1, 0, 1]
        assert [chunk.is_given for chunk in again] == [True, False, False]
        for chunk, other in zip(first, again, strict=True):
            assert torch.equal(chunk.latents, other.latents) and torch.equal(chunk.frames, other.frames)

    def test_reset_of_the_decoder_alone(self, pipe: ARDiffusionPipeline) -> None:
        """A decoder reset on the way began with a short chunk, so a bounded video ended three frames early."""
        plain = latents_of(pipe, num_frames=33)
        with stream_of(pipe, output_type="pt", num_frames=33) as stream:
            chunks = take(stream, 2)
            stream.reset(keep=("history", "text"))
            chunks += list(stream)
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks], dim=2), plain)
        assert [chunk.frames.shape[1] for chunk in chunks] == [9, 12, 12]

    def test_reset_of_the_history_alone(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, output_type="pt") as stream:
            take(stream, 2)
            stream.reset(keep=("text", "vae"))
            chunk = next(stream)
        assert (chunk.start_latent_frame, chunk.frames.shape[1]) == (0, 12)

    def test_reset_of_the_text(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            next(stream)
            stream.reset(keep=())
            stream.switch_prompt("blue square")
            next(stream)
        stream = stream_of(pipe)
        stream.reset(keep=("history",))
        with pytest.raises(RuntimeError, match="branch 'positive' has no prompt; set one"):
            next(stream)

    def test_reset_forgets_the_commit_that_was_due(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, record_forwards(pipe.transformer) as forwards:
            next(stream)
            stream.reset()
            next(stream)
        assert [t for t in forwards.timesteps if t == 0.0] == []

    def test_unknown_state(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, pytest.raises(ValueError, match=r"unknown state \['cache'\].*history"):
            stream.reset(keep=("cache",))

    @staticmethod
    def noise() -> torch.Tensor:
        return torch.randn(1, 16, 12, 4, 6, generator=seed(1))


class TestFlatCost:
    """60 chunks of 3 frames behind a window of 5: nothing grows."""

    @pytest.fixture
    def layouts(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
        """Shapes of the layer inputs, and the lengths read, of every forward."""
        seen: list[tuple[Any, ...]] = []
        prepare = PagedForwardContext.prepare

        def note(context: PagedForwardContext) -> PagedForwardContext:
            prepare(context)
            inputs = context.layer_inputs(0)
            seen.append((tuple(tuple(tensor.shape) for tensor in inputs), inputs.seq_lens.tolist()))
            return context

        monkeypatch.setattr(PagedForwardContext, "prepare", note)
        yield seen

    def test_sixty_chunks(self, pipe: ARDiffusionPipeline, layouts: list[tuple[Any, ...]]) -> None:
        recipe = QUICK.replace(denoising_steps=(1000,))
        manager = pipe.create_cache(recipe=recipe)
        with stream_of(pipe, recipe=recipe, cache=manager) as stream:
            next(stream)
            pages, used = pool_pages(manager), manager.allocator.num_used
            for _ in range(59):
                chunk = next(stream)
                assert chunk.latents.isfinite().all()
                assert pool_pages(manager) == pages and manager.allocator.num_used == used
                assert stream.rollout.recent_latents.shape[2] <= 6
            assert (chunk.index, chunk.start_latent_frame) == (59, 177)
            assert manager.sessions[0].branch().committed_tokens == 177 * TOKENS_PER_FRAME
        assert len(layouts) == 60 + 59
        assert len({shapes for shapes, _ in layouts}) == 1
        assert {tuple(lengths) for _, lengths in layouts[2:]} == {(36,)}, "sink of 1 and window of 5, 6 tokens each"

    def test_memory_of_the_process_side_state(self, pipe: ARDiffusionPipeline) -> None:
        recipe = QUICK.replace(denoising_steps=(1000,))
        with stream_of(pipe, recipe=recipe, output_type="pt") as stream:
            take(stream, 3)
            sizes = {(stream.vae_state_bytes, stream.rollout.recent_latents.untyped_storage().nbytes())}
            for _ in range(5):
                next(stream)
                sizes.add((stream.vae_state_bytes, stream.rollout.recent_latents.untyped_storage().nbytes()))
        assert len(sizes) == 1


def test_keys_go_through_the_pool(pipe: ARDiffusionPipeline) -> None:
    """Guards the file: a pipeline that ran the host's attention would pass most of it."""
    manager = pipe.create_cache()
    manager.storage.fill_(0.0)
    with stream_of(pipe, cache=manager) as stream:
        next(stream)
        assert (manager.storage.key_pools[1] != 0).any()
