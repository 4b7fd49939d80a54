"""Live control: events from other threads, applied in order at the next chunk. One chunk is 3 latent frames."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_streams import NEW, OLD, THIRD, stream_of, switched_latents, take
from tiny_components import (
    QUICK,
    TEXT_DIM,
    TEXT_LEN,
    failing,
    latents_of,
    make_pipeline,
)

from diffusers_ardiff import ARDiffusionPipeline, EventQueueFullError, PromptSwitch
from diffusers_ardiff.cache import KVManager

SWITCHES: list[dict[str, Any]] = [
    {"mode": "text"},
    {"mode": "recache"},
    {"mode": "flush", "keep_frames": 2},
    {"mode": "blend", "blend_chunks": 2},
]
by_mode = pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch["mode"])


def in_other_thread(work: Callable[[], Any]) -> Any:
    """Run to the end in another thread; returns or raises what the work does."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


class TestUpdate:
    @by_mode
    @pytest.mark.parametrize("num_before", [0, 2])
    def test_equals_the_immediate_switch(
        self, pipe: ARDiffusionPipeline, switch: dict[str, Any], num_before: int
    ) -> None:
        expected = switched_latents(pipe, num_before, 3, prompt_embeds=NEW, **switch)
        with stream_of(pipe) as stream:
            chunks = [take(stream, num_before)] if num_before else []
            assert in_other_thread(lambda: stream.update(prompt_embeds=NEW, **switch))
            chunks.append(take(stream, 3))
        assert torch.equal(torch.cat(chunks, dim=2), expected)

    @by_mode
    def test_words_in_flight_wait_for_the_next_chunk(self, pipe: ARDiffusionPipeline, switch: dict[str, Any]) -> None:
        """The second chunk of three is between its two steps when another thread asks for a new prompt."""
        expected = switched_latents(pipe, 2, 2, prompt="blue square", **switch)

        def send(_pipe: Any, step: int, *_args: Any) -> None:
            if step == 2:
                assert in_other_thread(lambda: stream.update("blue square", **switch))

        with stream_of(pipe, callback_on_step_end=send) as stream:
            chunks = [next(stream) for _ in range(4)]
        assert [chunk.last_event_id for chunk in chunks] == [None, None, 0, 0]
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks], dim=2), expected)

    def test_two_threads(self, pipe: ARDiffusionPipeline) -> None:
        """One thread iterates and one sends, an event a chunk; each chunk is as if its prompt had been switched."""
        turn, chunks = threading.Barrier(2, timeout=60), []
        prompts = [NEW, THIRD, OLD]
        stream = stream_of(pipe)

        def iterate() -> None:
            for _ in prompts:
                chunks.append(next(stream))
                turn.wait()  # a chunk is there
                turn.wait()  # the next event is there

        thread = threading.Thread(target=iterate)
        thread.start()
        for embeds in prompts:
            turn.wait()
            assert stream.update(prompt_embeds=embeds)
            turn.wait()
        thread.join(timeout=60)
        assert not thread.is_alive()
        with stream, stream_of(pipe) as expected:
            chunks.append(next(stream))
            for chunk, embeds in zip(chunks, [OLD, *prompts], strict=True):
                expected.switch_prompt(prompt_embeds=embeds)
                assert torch.equal(chunk.latents, next(expected).latents)
        assert [chunk.last_event_id for chunk in chunks] == [None, 0, 1, 2]

    def test_all_pending_are_applied_in_order(self, pipe: ARDiffusionPipeline) -> None:
        """A flush between two changes of text is not lost, and the last text wins."""
        with stream_of(pipe) as stream:
            first = take(stream, 2)
            assert stream.update(prompt_embeds=THIRD, event_id=3)
            assert stream.update(prompt_embeds=THIRD, mode="flush", keep_frames=1, event_id=5)
            assert stream.update(prompt_embeds=NEW, event_id=9)
            chunk = next(stream)
        with stream_of(pipe) as expected:
            assert torch.equal(take(expected, 2), first)
            expected.switch_prompt(prompt_embeds=NEW, mode="flush", keep_frames=1)
            assert torch.equal(next(expected).latents, chunk.latents)
        assert chunk.last_event_id == 9

    def test_duplicates_and_older_ids_change_nothing(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        with stream_of(pipe) as stream:
            assert stream.update(prompt_embeds=OLD, event_id=4)
            assert not stream.update(prompt_embeds=NEW, event_id=4)
            chunks = [take(stream, 1)]
            for event_id in (4, 3, 0):
                assert not stream.update(prompt_embeds=NEW, mode="flush", event_id=event_id)
            chunks.append(take(stream, 3))
        assert torch.equal(torch.cat(chunks, dim=2), plain)

    def test_full_queue(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe, max_pending_events=2) as stream:
            for embeds in (THIRD, NEW):
                stream.update(prompt_embeds=embeds)
            with pytest.raises(EventQueueFullError, match="2 events wait"):
                in_other_thread(lambda: stream.update(prompt_embeds=OLD))
            assert torch.equal(take(stream, 2), latents_of(pipe, None, prompt_embeds=NEW))
            assert stream.update(prompt_embeds=OLD)

    def test_default_queue_takes_sixteen(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            assert all(stream.update(prompt_embeds=NEW) for _ in range(16))
            with pytest.raises(EventQueueFullError, match="16 events wait"):
                stream.update(prompt_embeds=NEW)

    def test_given_frames_keep_their_prompt(self, pipe: ARDiffusionPipeline) -> None:
        """Events wait for the first chunk that is denoised, like a schedule."""
        call = {"context_latents": torch.randn(1, 16, 3, 4, 6), "num_frames": 21}
        with stream_of(pipe, **call) as stream:
            stream.update(prompt_embeds=NEW)
            given, made = next(stream), next(stream)
        schedule = [PromptSwitch(latent_frame=0, prompt_embeds=NEW)]
        expected = latents_of(pipe, None, prompt_embeds=OLD, prompt_schedule=schedule, **call)
        assert torch.equal(torch.cat([given.latents, made.latents], dim=2), expected)
        assert (given.is_given, given.last_event_id, made.last_event_id) == (True, None, 0)

    def test_event_beats_a_schedule_at_the_same_chunk(self, pipe: ARDiffusionPipeline) -> None:
        schedule = [PromptSwitch(latent_frame=3, prompt_embeds=THIRD)]
        with stream_of(pipe, prompt_schedule=schedule) as stream:
            first = take(stream, 1)
            stream.update(prompt_embeds=NEW)
            latents = torch.cat([first, take(stream, 1)], dim=2)
        assert torch.equal(latents, switched_latents(pipe, 1, 1, prompt_embeds=NEW))

    def test_embeddings_changed_by_their_owner(self, pipe: ARDiffusionPipeline) -> None:
        """The event holds what was sent, not what the tensor or the list holds when it is applied."""
        embeds, prompts = NEW.clone(), ["blue square"]
        for sent, change in ((embeds, {"prompt_embeds": embeds}), (prompts, {"prompt": prompts})):
            expected = switched_latents(pipe, 0, 1, **change)
            with stream_of(pipe) as stream:
                stream.update(**change)
                if isinstance(sent, list):
                    sent[0] = "red"
                else:
                    sent.zero_()
                assert torch.equal(take(stream, 1), expected)


class TestBadEvents:
    """Refused in the caller's thread; nothing waits afterwards and no id is used up."""

    @pytest.mark.parametrize(
        ("event", "message"),
        [
            ({}, "an event needs a prompt, `prompt_embeds` or `controls`"),
            ({"prompt": "blue", "prompt_embeds": NEW}, "either `prompt` or `prompt_embeds`"),
            ({"prompt": "blue", "mode": "reset"}, "unknown prompt switch mode 'reset'"),
            ({"prompt": "blue", "keep_frames": 1}, "keep_frames=1 only goes with mode 'flush'"),
            ({"prompt": "blue", "blend_chunks": 1}, "blend_chunks=1 only goes with mode 'blend'"),
            ({"prompt": "blue", "mode": "blend"}, "mode 'blend' needs blend_chunks.*at least 1, got 0"),
            ({"prompt": "blue", "event_id": -2}, "event_id must be a whole number >= 0"),
            ({"prompt": ["a", "b"]}, "the event has 2 prompts for 1 videos"),
            ({"prompt_embeds": torch.zeros(TEXT_LEN, TEXT_DIM)}, r"must be \(prompts, text_len, text_dim\)"),
            ({"prompt_embeds": torch.zeros(1, TEXT_LEN, 31)}, r"must be \(videos or 1, 12, 32\).* got \(1, 12, 31\)"),
            ({"prompt_embeds": torch.zeros(1, 9, TEXT_DIM)}, r"the text length that this stream was planned for"),
            ({"controls": 1}, "this stream has no `control_hook`"),
            ({"controls": 1, "mode": "recache"}, "mode 'recache' .*goes with a new prompt"),
        ],
        ids=lambda value: "-".join(value) or "nothing" if isinstance(value, dict) else None,
    )
    def test_values(self, pipe: ARDiffusionPipeline, event: dict[str, Any], message: str) -> None:
        with stream_of(pipe) as stream:
            with pytest.raises(ValueError, match=message):
                stream.update(**event)
            assert (len(stream.inbox.mailbox), stream.inbox.mailbox.last_id) == (0, -1)

    def test_prompt_of_another_type(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, pytest.raises(TypeError, match="must be a string or a list of strings, got 3"):
            stream.update(3)  # type: ignore[arg-type]

    def test_words_without_a_text_encoder(self) -> None:
        bare = make_pipeline(QUICK, tokenizer=None, text_encoder=None)
        with (
            stream_of(bare) as stream,
            pytest.raises(ValueError, match="without a text encoder; give `prompt_embeds`"),
        ):
            stream.update("blue square")

    def test_closed(self, pipe: ARDiffusionPipeline) -> None:
        stream = stream_of(pipe)
        stream.update(prompt_embeds=NEW)
        stream.close()
        assert len(stream.inbox.mailbox) == 0
        with pytest.raises(RuntimeError, match="this stream is closed; start a new one"):
            stream.update(prompt_embeds=NEW)

    @pytest.mark.parametrize("number", [0, -1, 1.5])
    def test_queue_size(self, pipe: ARDiffusionPipeline, number: Any) -> None:
        with pytest.raises(ValueError, match="max_pending_events must be a whole number >= 1"):
            stream_of(pipe, max_pending_events=number)


class TestFailingEvents:
    """They raise in the thread that iterates, change nothing, are dropped, and leave the stream open."""

    @by_mode
    def test_text_encoder(self, pipe: ARDiffusionPipeline, plain: torch.Tensor, switch: dict[str, Any]) -> None:
        with stream_of(pipe, control_hook=lambda _inputs: {}) as stream:
            chunks = [take(stream, 2)]
            stream.update("blue square", controls="new", **switch)
            with failing(pipe.text_encoder, RuntimeError("lost")), pytest.raises(RuntimeError, match="lost") as raised:
                next(stream)
            assert raised.value.__notes__ == ["raised by event 0, which is dropped."]
            assert not stream.closed and stream.rollout.controls is None
            last = next(stream)
            chunks += [last.latents, take(stream, 1)]
            assert last.last_event_id is None
        assert torch.equal(torch.cat(chunks, dim=2), plain)

    def test_others_are_applied(self, pipe: ARDiffusionPipeline) -> None:
        """The one before the failed event is in force, the one after it waits for the next call."""
        with stream_of(pipe) as stream:
            stream.update(prompt_embeds=THIRD)
            stream.update("blue square")
            stream.update(prompt_embeds=NEW, mode="flush")
            with failing(pipe.text_encoder, RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
                next(stream)
            assert len(stream.inbox.mailbox) == 1
            assert torch.equal(take(stream, 1), switched_latents(pipe, 0, 1, prompt_embeds=NEW, mode="flush"))

    def test_failed_recache_is_healed_by_the_same_event(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        expected = switched_latents(pipe, 2, 2, prompt_embeds=NEW, mode="recache")
        with stream_of(pipe, cache=manager) as stream:
            chunks = [take(stream, 2)]
            stream.update(prompt_embeds=NEW, mode="recache")
            with failing(pipe.transformer.blocks[1], RuntimeError("lost"), after=1), pytest.raises(RuntimeError):
                next(stream)
            assert manager.sessions[0].branch().ring.stale and not stream.closed
            assert stream.update(prompt_embeds=NEW, mode="recache")
            chunks.append(take(stream, 2))
        assert torch.equal(torch.cat(chunks, dim=2), expected)

    def test_failed_recache_alone_closes_at_the_next_chunk(
        self, pipe: ARDiffusionPipeline, manager: KVManager
    ) -> None:
        stream = stream_of(pipe, cache=manager)
        take(stream, 2)
        stream.update(prompt_embeds=NEW, mode="recache")
        with failing(pipe.transformer.blocks[1], RuntimeError("lost"), after=1), pytest.raises(RuntimeError):
            next(stream)
        with pytest.raises(RuntimeError, match="stale"):
            next(stream)
        assert stream.closed and manager.allocator.num_used == 0

    def test_commit_that_fails_closes(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """It is no event's fault."""
        stream = stream_of(pipe, cache=manager)
        take(stream, 1)
        stream.update(prompt_embeds=NEW)
        with failing(pipe.transformer.blocks[1], RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
            next(stream)
        assert stream.closed and manager.allocator.num_used == 0
