"""The recipes krea and rolling-forcing against dense rollouts written from what their papers' code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from dense_video import DenseVideo, absolute, few_steps, relative
from session_runs import SHUFFLES
from tiny_components import TOKENS_PER_FRAME, failing, random_embeds, record_forwards, seed

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, Recipe, StreamBatch
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.recipes import load_recipe

TEXT, NEW = random_embeds(1), random_embeds(2)
CHUNK = (1, 16, 3, 4, 6)
SMALL = {"height": 32, "width": 48, "num_frames": 21}
KREA = load_recipe("krea").replace(**SMALL, encode_first_frame=False)
ROLLING = load_recipe("rolling-forcing").replace(**SMALL)


def noise_of(chunk: int, step: int, shape: tuple[int, ...] = CHUNK) -> torch.Tensor:
    """The same for everybody: step -1 is a chunk's initial noise."""
    return torch.randn(shape, generator=seed(1000 + 10 * chunk + step))


def stream_of(pipe: ARDiffusionPipeline, recipe: Recipe, **call: Any) -> ARStream:
    num_chunks = 14 if "num_frames" not in call else -(-((call["num_frames"] - 1) // 4 + 1) // 3)
    latents = torch.cat([noise_of(chunk, -1) for chunk in range(num_chunks)], dim=2)
    call = {"prompt_embeds": TEXT, "latents": latents, "step_noise": noise_of, "output_type": "latent"} | call
    return pipe.stream(recipe=recipe, **call)


def take(stream: ARStream, count: int) -> list[torch.Tensor]:
    return [next(stream).latents for _ in range(count)]


class DenseKrea:
    """Caches emptied before each block; context [first frame, last two] at positions 0..2; the block after it."""

    TIMESTEPS = (1000.0, 937.5, 833.3333, 625.0, 0.0)
    SIGMAS = (1.0, 0.9375, 0.8333333, 0.625, 0.00498008)

    def __init__(self, pipe: ARDiffusionPipeline, given: torch.Tensor | None = None) -> None:
        self.video = DenseVideo(pipe.transformer, TEXT, absolute)
        self.frames = torch.zeros(1, 16, 0, 4, 6) if given is None else given
        self.num_chunks = 0

    def prepare(self) -> None:
        """The forward over the context, under the text that is in force now."""
        start = self.frames.shape[2]
        self.video.forget()
        if start > 0:
            tail = max(start - 2, 1)
            past = torch.cat([self.first_frame(tail), self.frames[:, :, tail:]], dim=2)
            self.video.forward(past, 0.0, range(past.shape[2]), [], keep=True)

    def first_frame(self, tail: int) -> torch.Tensor:
        """The context's first latent frame; ``tail`` is the first of the others."""
        return self.frames[:, :, :1]

    def chunk(self) -> torch.Tensor:
        place = min(self.frames.shape[2], 3)
        own = range(place, place + 3)
        noise = [noise_of(self.num_chunks, step) for step in range(-1, 4)]
        clean = few_steps(
            lambda latents, timestep: self.video.forward(latents, timestep, own, range(place)),
            noise[0],
            noise[1:],
            self.TIMESTEPS,
            self.SIGMAS,
        )
        self.frames = torch.cat([self.frames, clean], dim=2)
        self.num_chunks += 1
        return clean


def follow(stream: ARStream, dense: DenseKrea, num_chunks: int) -> None:
    """The stream's next chunks are those of the dense rollout."""
    for _ in range(num_chunks):
        dense.prepare()
        assert relative_error(next(stream).latents, dense.chunk()) < 1e-4


class DenseRolling:
    """Five blocks in one forward, each at its own timestep; 21 frames visible at most: sink, cached ones, the blocks."""

    TIMESTEPS = (1000.0, 952.38095, 882.35294, 769.23077, 555.55556)

    def __init__(self, pipe: ARDiffusionPipeline, num_chunks: int | None = None) -> None:
        self.video = DenseVideo(pipe.transformer, TEXT, relative)
        self.num_chunks = num_chunks
        self.first = self.num_entered = self.num_forwards = 0
        self.blocks: dict[int, torch.Tensor] = {}

    def past(self, num_blocks: int) -> list[int]:
        """Sink and the cached frames before the oldest block: as many as make 21 with the sink and the blocks."""
        start, budget = 3 * self.first, 21 - 3 - 3 * num_blocks
        return [frame for frame in range(start) if frame < 3 or frame >= start - budget]

    def commit(self, clean: torch.Tensor) -> None:
        own = range(3 * self.first, 3 * self.first + 3)
        self.video.forward(clean, 0.0, own, self.past(1), keep=True)
        self.first += 1

    def chunk(self) -> torch.Tensor:
        """Forwards until the oldest block has had five."""
        while True:
            if self.num_chunks is None or self.num_entered < self.num_chunks:
                self.blocks[self.num_entered] = noise_of(self.num_entered, -1)
                self.num_entered += 1
            finished = self.forward()
            if finished is not None:
                self.commit(finished)
                return finished

    def forward(self) -> torch.Tensor | None:
        """One step of every block; the oldest one's clean latents after its fifth."""
        # Block k enters at forward k.
        ages = {number: self.num_forwards - number for number in self.blocks}
        times = [self.TIMESTEPS[age] for age in ages.values() for _ in range(3)]
        own = range(3 * min(self.blocks), 3 * max(self.blocks) + 3)
        latents, past = torch.cat(list(self.blocks.values()), dim=2), self.past(len(self.blocks))
        velocity = self.video.forward(latents, times, own, past)
        finished = None
        for (number, age), part in zip(ages.items(), velocity.split(3, dim=2), strict=True):
            clean = self.blocks[number] - self.TIMESTEPS[age] / 1000 * part
            if age == 4:
                del self.blocks[number]
                finished = clean
                continue
            sigma = self.TIMESTEPS[age + 1] / 1000
            self.blocks[number] = (1 - sigma) * clean + sigma * noise_of(number, age)
        self.num_forwards += 1
        return finished


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
class TestKrea:
    def test_as_dense(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        dense = DenseKrea(pipe)
        with stream_of(pipe, KREA, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            follow(stream, dense, 6)

    def test_a_prompt_change_reaches_the_context_a_block_later(
        self, pipe: ARDiffusionPipeline, shuffle_seed: int | None
    ) -> None:
        dense = DenseKrea(pipe)
        with stream_of(pipe, KREA, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            for number in range(5):
                dense.prepare()
                if number == 3:
                    dense.video.text = NEW
                    stream.update(prompt_embeds=NEW)
                assert relative_error(next(stream).latents, dense.chunk()) < 1e-4

    def test_recache_brings_it_there_at_once(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        dense = DenseKrea(pipe)
        with stream_of(pipe, KREA, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            follow(stream, dense, 3)
            dense.video.text = NEW
            stream.update(prompt_embeds=NEW, mode="recache")
            follow(stream, dense, 2)

    @pytest.mark.parametrize("num_given", [1, 2, 4, 6])
    def test_given_frames(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None, num_given: int) -> None:
        given = torch.randn(1, 16, num_given, 4, 6, generator=seed(9))
        dense = DenseKrea(pipe, given)
        with stream_of(pipe, KREA, context_latents=given, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            take(stream, -(-num_given // 3))
            follow(stream, dense, 3)


class TestKreaSessions:
    def test_forwards(self, pipe: ARDiffusionPipeline) -> None:
        """Five steps a block, and one forward over three frames before each but the first; none after the last."""
        with record_forwards(pipe.transformer) as seen, stream_of(pipe, KREA, num_frames=33) as stream:
            assert len(list(stream)) == 3
            assert stream.state.num_timesteps == 15
        assert [round(t, 2) for t in seen.timesteps] == ([1000, 937.5, 833.33, 625, 0, 0] * 3)[:-1]
        assert {latents.shape[2] for latents in seen.inputs} == {3}

    def test_positions_never_grow(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, KREA) as stream:
            for _ in range(5):
                next(stream)
            assert stream.rollout.sessions[0].branch().committed_tokens == 3 * TOKENS_PER_FRAME
            assert stream.rollout.num_latent_frames == 15

    def test_fork_offload_and_reset(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, KREA) as single:
            expected = take(single, 6)
        pool = pipe.create_cache(recipe=KREA, num_videos=2)
        stream = stream_of(pipe, KREA, cache=pool)
        take(stream, 3)
        child = stream.fork()
        stream.offload()
        assert all(torch.equal(a, b) for a, b in zip(take(child, 3), expected[3:], strict=True))
        child.close()
        stream.onload()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 3), expected[3:], strict=True))
        stream.reset()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 6), expected, strict=True))
        pool.check_integrity()

    def test_a_context_forward_that_fails(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, KREA) as single:
            expected = take(single, 5)
        stream = stream_of(pipe, KREA)
        take(stream, 3)
        with failing(pipe.transformer.blocks[1], OSError("gone")), pytest.raises(OSError, match="gone"):
            stream.rollout.commit_held()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 2), expected[3:], strict=True))

    def test_together(self, pipe: ARDiffusionPipeline) -> None:
        pool = pipe.create_cache(recipe=KREA, num_videos=2)
        first, second = (stream_of(pipe, KREA, cache=pool) for _ in range(2))
        expected = take(first, 2)
        batch = StreamBatch([first, second])
        chunks = [batch.step() for _ in range(3)]
        dense = DenseKrea(pipe)
        for number in range(5):
            dense.prepare()
            latents = dense.chunk()
            have = [expected[number]] if number < 2 else [chunks[number - 2][0].latents]
            have += [chunks[number][1].latents] if number < 3 else []
            assert all(relative_error(part, latents) < 1e-4 for part in have)

    def test_controls_follow_their_frames(self, pipe: ARDiffusionPipeline) -> None:
        seen = []
        call = {"control_hook": lambda inputs: seen.append(inputs) or {}, "controls": "a"}
        with stream_of(pipe, KREA, **call) as stream:
            for name in "bcd":
                next(stream)
                stream.update(controls=name)
            seen.clear()
            next(stream)
        # Frames 0, 7 and 8 are the context of the block that begins at frame 9.
        assert (seen[0].frame_controls, seen[0].start_latent_frame) == (("a", "c", "c"), 0)
        assert [(s.controls, s.start_latent_frame) for s in seen[1:]] == [("d", 9)] * 5

    def test_flush_is_refused(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, KREA) as stream:
            next(stream)
            with pytest.raises(ValueError, match="computes its context again before each chunk"):
                stream.switch_prompt(prompt_embeds=NEW, mode="flush")

    def test_no_sink_is_turned(self, pipe: ARDiffusionPipeline) -> None:
        assert pipe.plan_memory(recipe=KREA).sink_bytes == 0
        with stream_of(pipe, KREA) as stream:
            take(stream, 5)
            assert stream.rollout.sessions[0].branch().sink.written == ()


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
class TestRolling:
    def test_as_dense(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        """Ramp-up, then ten chunks: 3 past frames are visible to five chunks, 15 to a commit; the sink is turned for each,
        the ring overwritten."""
        dense = DenseRolling(pipe)
        with stream_of(pipe, ROLLING, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            for _ in range(10):
                assert relative_error(next(stream).latents, dense.chunk()) < 1e-4

    @pytest.mark.parametrize("num_chunks", [1, 3, 7, 10])
    def test_ramp_down(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None, num_chunks: int) -> None:
        """A bounded video: the last forwards hold fewer chunks and see more of the past; N + 4 of them, and N - 1 commits."""
        dense = DenseRolling(pipe, num_chunks)
        frames = 1 + 4 * (3 * num_chunks - 1)
        cache = CacheOptions(shuffle_seed=shuffle_seed)
        with stream_of(pipe, ROLLING, num_frames=frames, cache=cache) as stream:
            latents = [chunk.latents for chunk in stream]
            assert stream.state.num_timesteps == stream.num_steps == num_chunks + 4
        assert len(latents) == num_chunks
        for part in latents:
            assert relative_error(part, dense.chunk()) < 1e-4

    def test_prompt_change(self, pipe: ARDiffusionPipeline, shuffle_seed: int | None) -> None:
        """All chunks in the window go on under the new text; the commit that is due still has the old one."""
        dense = DenseRolling(pipe)
        with stream_of(pipe, ROLLING, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
            for number in range(5):
                if number == 2:
                    dense.video.text = NEW
                    stream.update(prompt_embeds=NEW)
                assert relative_error(next(stream).latents, dense.chunk()) < 1e-4


class TestRollingSessions:
    def test_neighbours_matter(self, pipe: ARDiffusionPipeline) -> None:
        """The chunks behind it change a chunk: rows that nobody attends to would pass the tests above by half."""
        with stream_of(pipe, ROLLING, num_frames=9) as stream:
            (alone,) = [chunk.latents for chunk in stream]
        with stream_of(pipe, ROLLING) as stream:
            assert relative_error(next(stream).latents, alone) > 1e-2

    def test_fork_offload_and_reset(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, ROLLING) as single:
            expected = take(single, 6)
        pool = pipe.create_cache(recipe=ROLLING, num_videos=2)
        stream = stream_of(pipe, ROLLING, cache=pool)
        take(stream, 3)
        child = stream.fork()
        stream.offload()
        assert all(torch.equal(a, b) for a, b in zip(take(child, 3), expected[3:], strict=True))
        child.close()
        stream.onload()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 3), expected[3:], strict=True))
        stream.reset()
        assert all(torch.equal(a, b) for a, b in zip(take(stream, 6), expected, strict=True))
        pool.check_integrity()

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_together(self, pipe: ARDiffusionPipeline, after: int) -> None:
        """Two of a kind; a forward of both that fails, in a commit or with a new chunk in the window, is made good."""
        pool = pipe.create_cache(recipe=ROLLING, num_videos=2)
        first, second = (stream_of(pipe, ROLLING, cache=pool) for _ in range(2))
        expected = take(stream_of(pipe, ROLLING), 5)
        take(first, 1), take(second, 1)
        batch = StreamBatch([first, second])
        with failing(pipe.transformer.blocks[1], MemoryError(), after=after), pytest.raises(MemoryError):
            batch.step(), batch.step()
        done = first.rollout.num_latent_frames // 3
        chunks = [batch.step() for _ in range(2)]
        for number, (left, right) in enumerate(chunks, start=done):
            assert relative_error(left.latents, expected[number]) < 1e-4
            assert relative_error(right.latents, expected[number]) < 1e-4

    @pytest.mark.parametrize("after", [1, 3])
    def test_a_shared_failure_while_the_window_fills(self, pipe: ARDiffusionPipeline, after: int) -> None:
        """Chunks that entered and steps that were made are undone with the noise they drew: the same bits come again."""
        pool = pipe.create_cache(recipe=ROLLING, num_videos=4)
        batch, twin = (
            StreamBatch(
                pipe.stream(
                    prompt_embeds=TEXT, recipe=ROLLING, generator=seed(number), cache=pool, output_type="latent"
                )
                for number in range(2)
            )
            for _ in range(2)
        )
        with failing(pipe.transformer.blocks[1], MemoryError(), after=after), pytest.raises(MemoryError):
            batch.step()
        for _ in range(3):
            for chunk, expected in zip(batch.step(), twin.step(), strict=True):
                assert torch.equal(chunk.latents, expected.latents)

    def test_one_ahead(self, pipe: ARDiffusionPipeline) -> None:
        pool = pipe.create_cache(recipe=ROLLING, num_videos=2)
        first, second = (stream_of(pipe, ROLLING, cache=pool) for _ in range(2))
        expected = take(first, 2)
        batch = StreamBatch([first, second])
        chunks = [batch.step() for _ in range(3)]
        for number in range(3):
            if number < 2:
                assert relative_error(chunks[number][1].latents, expected[number]) < 1e-4
        dense = DenseRolling(pipe)
        whole = [dense.chunk() for _ in range(5)]
        assert all(relative_error(chunks[n][0].latents, whole[n + 2]) < 1e-4 for n in range(3))
        assert all(relative_error(chunks[n][1].latents, whole[n]) < 1e-4 for n in range(3))

    def test_callbacks_see_the_oldest_chunk(self, pipe: ARDiffusionPipeline) -> None:
        times = []

        def note(_pipe, _step, timestep, tensors):
            times.append((round(timestep, 1), tuple(tensors["latents"].shape)))

        with stream_of(pipe, ROLLING, callback_on_step_end=note) as stream:
            take(stream, 2)
        steps = [1000.0, 952.4, 882.4, 769.2, 555.6, 555.6]
        assert times == [(time, CHUNK) for time in steps]

    def test_several_videos_and_guidance(self, pipe: ARDiffusionPipeline) -> None:
        call = {"num_frames": 33, "output_type": "latent", "recipe": ROLLING, "guidance_scale": 2.0}
        texts = random_embeds(5, rows=2)
        both = pipe(prompt_embeds=texts, negative_prompt_embeds=TEXT, generator=[seed(1), seed(2)], **call).frames
        for row in range(2):
            single = pipe(
                prompt_embeds=texts[row : row + 1], negative_prompt_embeds=TEXT, generator=seed(row + 1), **call
            )
            assert relative_error(both[row], single.frames[0]) < 1e-4

    def test_pages_for_the_extra_rows(self, pipe: ARDiffusionPipeline) -> None:
        """3 frames of sink, 18 of window and 12 that are not committed yet, in the plan and in the pool."""
        plan = pipe.plan_memory(recipe=ROLLING)
        assert plan.pages_per_branch == -(-33 * TOKENS_PER_FRAME // 16)
        pool = pipe.create_cache(recipe=ROLLING)
        assert pool.plan.pool_bytes == pool.storage.num_bytes == plan.pool_bytes
        small = pipe.create_cache(recipe=ROLLING.replace(context_mode="commit"))
        with pytest.raises(ValueError, match="the given cache holds"):
            stream_of(pipe, ROLLING, cache=small)

    def test_decoded(self, pipe: ARDiffusionPipeline) -> None:
        video = pipe(prompt_embeds=TEXT, num_frames=21, recipe=ROLLING, generator=seed(0), output_type="np").frames
        assert video.shape == (1, 21, 32, 48, 3)


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        (KREA, {"context_mode": "again"}, "context_mode = 'again': allowed is one of"),
        (KREA, {"clean_last_step": 1}, "clean_last_step = 1: allowed are True and False"),
        (
            KREA,
            {"num_window_frames": None, "max_latent_frames": 21, "rope_policy": "absolute", "rope_limit_frames": None},
            "needs a window",
        ),
        (
            ROLLING,
            {"num_window_frames": 14},
            "num_window_frames = 14: allowed is at least all chunks of a rolling window = 15",
        ),
        (ROLLING, {"first_chunk_frames": 1}, "chunks of one size and one step list"),
        (ROLLING, {"clean_last_step": True}, "chunks of one size and one step list"),
    ],
)
def test_recipes_that_are_refused(recipe: Recipe, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.replace(**change)
