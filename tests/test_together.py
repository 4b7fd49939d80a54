"""Streams that share forwards: each makes the video it makes alone, and what goes wrong in one stays there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import NEW, OLD, THIRD
from tiny_components import QUICK, failing, random_embeds, record_forwards, seed

from diffusers_ardiff import ARDiffusionPipeline, StreamBatch, StreamBatchError
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.video_io import read_video

NUM_STEPS = len(QUICK.denoising_steps)


@pytest.fixture
def pool(pipe: ARDiffusionPipeline) -> KVManager:
    pool = pipe.create_cache(num_videos=4)
    pool.storage.fill_(float("nan"))
    return pool


def stream_of(pipe: ARDiffusionPipeline, number: int, **call: Any) -> ARStream:
    """A latent stream whose prompt and noise follow from its number."""
    call = {"prompt_embeds": random_embeds(50 + number), "generator": seed(number), "output_type": "latent"} | call
    return pipe.stream(**call)


def alone(pipe: ARDiffusionPipeline, number: int, count: int, **call: Any) -> list[torch.Tensor]:
    """Latents of the first chunks of a stream in a pool of its own."""
    with stream_of(pipe, number, **call) as stream:
        return [next(stream).latents for _ in range(count)]


def steps(batch: StreamBatch, count: int) -> list[list[torch.Tensor]]:
    """Latents of the next chunks: a list a stream."""
    rounds = [batch.step() for _ in range(count)]
    return [[chunks[i].latents for chunks in rounds] for i in range(len(batch.streams))]


def assert_same(have: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(have) == len(expected)
    for left, right in zip(have, expected, strict=True):
        assert relative_error(left, right) < 1e-4


class TestEachAsAlone:
    def test_different_fill_levels(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """At 0, 1 and 4 chunks in: empty, filling and wrapped rows in one forward, through two more overwrites."""
        streams = [stream_of(pipe, n, cache=pool) for n in range(3)]
        for stream, ahead in zip(streams, (0, 1, 4), strict=True):
            for _ in range(ahead):
                next(stream)
        have = steps(StreamBatch(streams), 4)
        for number, ahead in enumerate((0, 1, 4)):
            assert_same(have[number], alone(pipe, number, ahead + 4)[ahead:])
        pool.check_integrity()

    def test_prompts_matter(self, pipe: ARDiffusionPipeline) -> None:
        """Same noise, other prompt: another video. Without this, rows with exchanged texts could pass."""
        first = alone(pipe, 0, 2)
        other = alone(pipe, 0, 2, prompt_embeds=random_embeds(51))
        assert relative_error(first[1], other[1]) > 1e-2

    @pytest.mark.parametrize("mode", ["text", "recache"])
    def test_live_prompt_change_in_one(self, pipe: ARDiffusionPipeline, pool: KVManager, mode: str) -> None:
        first, second = (stream_of(pipe, n, cache=pool) for n in range(2))
        batch = StreamBatch([first, second])
        have = steps(batch, 2)
        first.update(prompt_embeds=NEW, mode=mode)
        later = steps(batch, 2)
        with stream_of(pipe, 0) as single:
            expected = [next(single).latents for _ in range(2)]
            single.update(prompt_embeds=NEW, mode=mode)
            expected += [next(single).latents for _ in range(2)]
        assert_same(have[0] + later[0], expected)
        assert_same(have[1] + later[1], alone(pipe, 1, 4))

    def test_blend_in_one(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        batch = StreamBatch([stream_of(pipe, 0, cache=pool), stream_of(pipe, 1, cache=pool)])
        batch.streams[0].update(prompt_embeds=NEW, mode="blend", blend_chunks=2)
        with stream_of(pipe, 0) as single:
            single.update(prompt_embeds=NEW, mode="blend", blend_chunks=2)
            expected = [next(single).latents for _ in range(3)]
        have = steps(batch, 3)
        assert_same(have[0], expected)
        assert_same(have[1], alone(pipe, 1, 3))

    def test_guidance_in_some(self, pipe: ARDiffusionPipeline) -> None:
        """Guided, unguided though it has the branch, and without a negative branch."""
        pool = pipe.create_cache(num_videos=3, guided=True)
        calls = [{"guidance_scale": 3.0, "negative_prompt_embeds": THIRD}, {"guidance_scale": 2.0}, {}]
        calls = [{"negative_prompt_embeds": OLD, **call} if call else call for call in calls]
        streams = [stream_of(pipe, n, cache=pool, **call) for n, call in enumerate(calls)]
        have = steps(StreamBatch(streams), 3)
        for number, call in enumerate(calls):
            assert_same(have[number], alone(pipe, number, 3, **call))

    def test_different_steps_and_chunk_sizes(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """Another number of steps, and a first chunk of one frame: the rows that fit together share a forward."""
        recipes = [QUICK, QUICK.replace(denoising_steps=(1000, 800, 300)), QUICK.replace(first_chunk_frames=1)]
        streams = [stream_of(pipe, n, cache=pool, recipe=recipe) for n, recipe in enumerate(recipes)]
        have = steps(StreamBatch(streams), 3)
        for number, recipe in enumerate(recipes):
            assert_same(have[number], alone(pipe, number, 3, recipe=recipe))

    def test_several_videos_a_stream(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        def pair() -> dict[str, Any]:
            return {"prompt_embeds": random_embeds(7, rows=2), "generator": [seed(5), seed(6)]}

        batch = StreamBatch([stream_of(pipe, 0, cache=pool, **pair()), stream_of(pipe, 1, cache=pool)])
        have = steps(batch, 3)
        assert_same(have[0], alone(pipe, 0, 3, **pair()))
        assert_same(have[1], alone(pipe, 1, 3))

    def test_embeddings_of_another_length_in_one(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        short = random_embeds(8, text_len=5)
        batch = StreamBatch([stream_of(pipe, n, cache=pool) for n in range(3)])
        have = steps(batch, 1)
        batch.streams[1].switch_prompt(prompt_embeds=short)
        later = steps(batch, 2)
        with stream_of(pipe, 1) as single:
            expected = [next(single).latents]
            single.switch_prompt(prompt_embeds=short)
            expected += [next(single).latents for _ in range(2)]
        assert_same(have[1] + later[1], expected)
        for number in (0, 2):
            assert_same(have[number] + later[number], alone(pipe, number, 3))

    def test_given_frames(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        given = torch.randn(1, 16, 1, 4, 6, generator=seed(3))
        batch = StreamBatch([stream_of(pipe, 0, cache=pool, context_latents=given), stream_of(pipe, 1, cache=pool)])
        have = steps(batch, 3)
        assert_same(have[0], alone(pipe, 0, 3, context_latents=given))
        assert_same(have[1], alone(pipe, 1, 3))

    def test_control_hooks(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        def steer(inputs):
            return {"hidden_states": inputs.latents + inputs.controls * inputs.start_latent_frame}

        call = {"control_hook": steer, "controls": 0.1}
        batch = StreamBatch([stream_of(pipe, 0, cache=pool, **call), stream_of(pipe, 1, cache=pool)])
        have = steps(batch, 3)
        assert_same(have[0], alone(pipe, 0, 3, **call))
        assert_same(have[1], alone(pipe, 1, 3))
        assert relative_error(have[0][2], alone(pipe, 0, 3)[2]) > 1e-3

    def test_a_fork_beside_its_parent(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        parent = stream_of(pipe, 0, cache=pool)
        before = [next(parent).latents for _ in range(3)]
        child = parent.fork()
        have = steps(StreamBatch([parent, child]), 2)
        expected = alone(pipe, 0, 5)
        assert_same(before + have[0], expected)
        assert_same(before + have[1], expected)
        pool.check_integrity()

    def test_alone_and_together_in_turns(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        first, second = (stream_of(pipe, n, cache=pool) for n in range(2))
        batch = StreamBatch([first, second])
        latents = [batch.step()[0].latents, next(first).latents, batch.step()[0].latents]
        assert_same(latents, alone(pipe, 0, 3))
        assert_same([next(second).latents], alone(pipe, 1, 3)[2:])

    def test_decoded_frames(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        batch = StreamBatch([stream_of(pipe, n, cache=pool, output_type="pt") for n in range(2)])
        chunks = [batch.step() for _ in range(2)]
        assert [c.frames.shape[1] for c in chunks[0] + chunks[1]] == [9, 9, 12, 12]
        with stream_of(pipe, 1, output_type="pt") as single:
            for round_ in chunks:
                assert relative_error(round_[1].frames, next(single).frames) < 1e-4


class TestForwards:
    def test_one_a_step_and_one_commit(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        batch = StreamBatch([stream_of(pipe, n, cache=pool) for n in range(3)])
        with record_forwards(pipe.transformer) as seen:
            batch.step()
            first = len(seen)
            batch.step()
        assert (first, len(seen) - first) == (NUM_STEPS, NUM_STEPS + 1)
        assert {len(latents) for latents in seen.inputs} == {3}

    def test_text_is_joined_once(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        batch = StreamBatch([stream_of(pipe, n, cache=pool) for n in range(2)])
        batch.step()
        texts = [stream.rollout.sessions[0].branch().text for stream in batch.streams]
        batch.step()
        assert [stream.rollout.sessions[0].branch().text for stream in batch.streams] == texts
        pointers = {text.layers[0].key.untyped_storage().data_ptr() for text in texts}
        assert len(pointers) == 1

    def test_the_end_of_one(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """A bounded stream ends; the other goes on. The last chunk needs no commit."""
        batch = StreamBatch([stream_of(pipe, 0, cache=pool, num_frames=21), stream_of(pipe, 1, cache=pool)])
        rounds = [batch.step() for _ in range(4)]
        assert [chunks[0] is None for chunks in rounds] == [False, False, True, True]
        assert batch.streams[0].closed
        assert_same([chunks[1].latents for chunks in rounds], alone(pipe, 1, 4))
        assert len(pool.sessions) == 1


class TestFailures:
    """What goes wrong in one stream; ``alone`` says what the other has to be."""

    def test_a_callback_that_raises(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        def fail(_pipe, step, _timestep, _tensors):
            if step == NUM_STEPS:
                raise OSError("disk full")

        first, second = stream_of(pipe, 0, cache=pool, callback_on_step_end=fail), stream_of(pipe, 1, cache=pool)
        batch = StreamBatch([first, second])
        chunks = [batch.step()[1]]
        with pytest.raises(StreamBatchError, match=r"1 of 2 streams failed.*stream 0: OSError: disk full") as caught:
            batch.step()
        assert caught.value.chunks[0] is None
        assert list(caught.value.errors) == [0]
        chunks += [caught.value.chunks[1], batch.step()[1]]
        assert (first.closed, second.closed) == (True, False)
        assert_same([chunk.latents for chunk in chunks], alone(pipe, 1, 3))
        assert len(pool.sessions) == 1
        pool.check_integrity()

    def test_a_callback_that_runs_out(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        empty = iter(())
        first = stream_of(pipe, 0, cache=pool, callback_on_step_end=lambda *_: next(empty))
        with pytest.raises(StreamBatchError, match="raised StopIteration before the video's end"):
            StreamBatch([first, stream_of(pipe, 1, cache=pool)]).step()

    def test_an_event_that_fails(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """As in ``next``: the event is dropped, and the stream stays open with its old prompt."""
        first, second = (stream_of(pipe, n, cache=pool) for n in range(2))
        batch = StreamBatch([first, second])
        have = [batch.step()]
        first.update("a red circle")
        with failing(pipe.text_encoder, OSError("gone")), pytest.raises(StreamBatchError, match="gone") as caught:
            batch.step()
        assert not first.closed
        have += [caught.value.chunks, batch.step()]
        assert_same([chunks[0].latents for chunks in have if chunks[0]], alone(pipe, 0, 2))
        assert_same([chunks[1].latents for chunks in have], alone(pipe, 1, 3))

    def test_a_hook_that_fails(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        def steer(inputs):
            if inputs.start_latent_frame == 3:
                raise KeyError("left")
            return {}

        first, second = stream_of(pipe, 0, cache=pool, control_hook=steer), stream_of(pipe, 1, cache=pool)
        batch = StreamBatch([first, second])
        latents = [batch.step()[1].latents]
        with pytest.raises(StreamBatchError, match="left") as caught:
            batch.step()
        assert first.closed
        assert_same([*latents, caught.value.chunks[1].latents], alone(pipe, 1, 2))

    def test_an_offloaded_stream(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        first, second = (stream_of(pipe, n, cache=pool) for n in range(2))
        batch = StreamBatch([first, second])
        have = [batch.step()]
        first.offload()
        with pytest.raises(StreamBatchError, match="offloaded; call onload") as caught:
            batch.step()
        assert not first.closed
        first.onload()
        have += [caught.value.chunks, batch.step()]
        assert_same([chunks[0].latents for chunks in have if chunks[0]], alone(pipe, 0, 2))
        assert_same([chunks[1].latents for chunks in have], alone(pipe, 1, 3))

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_a_shared_forward_that_fails(self, pipe: ARDiffusionPipeline, pool: KVManager, after: int) -> None:
        """In the commit, the first and the second step: nobody is closed, and the same chunk comes again, bit by bit."""
        streams = [stream_of(pipe, n, cache=pool) for n in range(2)]
        streams[0].update(prompt_embeds=NEW, mode="blend", blend_chunks=3)
        twins = [stream_of(pipe, n, cache=pool) for n in range(2)]
        twins[0].update(prompt_embeds=NEW, mode="blend", blend_chunks=3)
        batch, twin = StreamBatch(streams), StreamBatch(twins)
        have = [batch.step()]
        with failing(pipe.transformer.blocks[1], MemoryError("no room"), after=after), pytest.raises(MemoryError):
            batch.step()
        assert not any(stream.closed for stream in streams)
        have += [batch.step(), batch.step()]
        for chunks in have:
            for chunk, expected in zip(chunks, twin.step(), strict=True):
                assert torch.equal(chunk.latents, expected.latents)
        assert [stream.num_steps for stream in streams] == [3 * NUM_STEPS] * 2
        pool.check_integrity()

    def test_a_shared_forward_that_fails_beside_given_frames(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        given = torch.randn(1, 16, 3, 4, 6, generator=seed(3))
        streams = [
            stream_of(pipe, 0, cache=pool, context_latents=given),
            *(stream_of(pipe, n, cache=pool) for n in (1, 2)),
        ]
        batch = StreamBatch(streams)
        with failing(pipe.transformer.blocks[1], MemoryError("no room")), pytest.raises(MemoryError):
            batch.step()
        chunks = batch.step()
        assert chunks[0].is_given
        assert torch.equal(chunks[0].latents, given)

    def test_a_failed_event_beside_a_shared_failure(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """The event is gone, so the error that comes instead has to say so."""
        batch = StreamBatch([stream_of(pipe, n, cache=pool) for n in range(3)])
        batch.streams[0].update("a red circle")
        broken = failing(pipe.transformer.blocks[1], MemoryError("no room"))
        with failing(pipe.text_encoder, OSError("gone")), broken, pytest.raises(MemoryError) as caught:
            batch.step()
        assert caught.value.__notes__ == ["stream 0 had failed by itself: OSError('gone')"]
        assert not any(stream.closed for stream in batch.streams)
        have = steps(batch, 2)
        for number in range(3):
            assert_same(have[number], alone(pipe, number, 2))

    def test_an_interrupt_closes_all(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        batch = StreamBatch([stream_of(pipe, n, cache=pool) for n in range(2)])
        with failing(pipe.transformer.blocks[0], KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            batch.step()
        assert all(stream.closed for stream in batch.streams)
        assert pool.allocator.num_used == 0


class TestMembers:
    def test_join_and_leave(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        first, second = (stream_of(pipe, n, cache=pool) for n in range(2))
        batch = StreamBatch([first])
        latents = [batch.step()[0].latents]
        batch.add(second)
        joined = batch.step()
        batch.remove(first)
        assert batch.streams == (second,)
        assert_same([*latents, joined[0].latents], alone(pipe, 0, 2))
        assert_same([joined[1].latents, batch.step()[0].latents], alone(pipe, 1, 2))
        assert not first.closed

    def test_refusals(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        first = stream_of(pipe, 0, cache=pool)
        batch = StreamBatch([first])
        with pytest.raises(ValueError, match="in the batch already"):
            batch.add(first)
        with pytest.raises(ValueError, match="another pool"), stream_of(pipe, 1) as other:
            batch.add(other)
        with pytest.raises(ValueError, match="another text length: 5 instead of 12"):
            batch.add(stream_of(pipe, 1, cache=pool, prompt_embeds=random_embeds(1, text_len=5)))
        closed = stream_of(pipe, 2, cache=pool)
        closed.close()
        with pytest.raises(ValueError, match="a closed stream"):
            batch.add(closed)
        with pytest.raises(ValueError, match="at least one stream"):
            StreamBatch([])
        assert batch.streams == (first,)

    def test_hooks_that_set_different_arguments(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        call = {"control_hook": lambda _: {"attention_kwargs": {}}}
        batch = StreamBatch([stream_of(pipe, 0, cache=pool, **call), stream_of(pipe, 1, cache=pool)])
        with pytest.raises(ValueError, match="need `attention_kwargs` from the control hook of each"):
            batch.step()
        assert not any(stream.closed for stream in batch.streams)


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two worlds, a prompt change and a fork on the built-in model."""
    script = Path(__file__).parents[1] / "scripts" / "worlds.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--chunks", "2", "--device", "cpu", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    lengths = {name: len(read_video(tmp_path / f"{name}.mp4")[0]) for name in ("changed", "forked", "fork")}
    assert lengths == {"changed": 21, "forked": 21, "fork": 12}
    assert "fork.mp4: 12 frames" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--chunks", "0"], "--chunks must be a whole number >= 1, got 0"), (["--output", "{file}"], "File exists")],
)
def test_script_with_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """A file in the folder's place was noticed when both worlds had been made, which were lost; no chunks at all ended in
    the traceback of a video without frames."""
    (tmp_path / "file").touch()
    script = Path(__file__).parents[1] / "scripts" / "worlds.py"
    given = [argument.format(file=tmp_path / "file") for argument in arguments]
    monkeypatch.setattr(sys, "argv", [str(script), "--device", "cpu", "--output", str(tmp_path), *given])
    monkeypatch.setattr("diffusers_ardiff.load.load_pipeline", lambda *_: pytest.fail("refused too late"))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert message in capsys.readouterr().err
