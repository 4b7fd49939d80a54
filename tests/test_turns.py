"""Threads and callbacks around a stream: turns, no orders amid a chunk, no copies, no models moved underneath it."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_components import PROMPT, QUICK, latents_of, make_pipeline, seed

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.pipelines import ARStream, StreamBatch

OTHER = "a blue square moving left"


@pytest.fixture
def pipe() -> ARDiffusionPipeline:
    return make_pipeline(QUICK)


def stream_of(pipe: ARDiffusionPipeline, prompt: str = PROMPT, value: int = 0, **call: Any) -> ARStream:
    return pipe.stream(prompt, **{"generator": seed(value), "output_type": "latent"} | call)


def joined(stream: ARStream) -> torch.Tensor:
    return torch.cat([chunk.latents for chunk in stream], dim=2)


class Worker(threading.Thread):
    """A thread that keeps what its function returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.value = error

    def result(self) -> Any:
        self.join(timeout=60)
        assert not self.is_alive()
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Pause:
    """Holds the first forward that enters the transformer's first block until told to go on."""

    def __init__(self, pipe: ARDiffusionPipeline) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._handle = pipe.transformer.blocks[0].register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self._handle.remove()
        self.inside.set()
        assert self.go.wait(timeout=60)


def paused(pipe: ARDiffusionPipeline, function: Callable[[], Any]) -> tuple[Pause, Worker]:
    """A thread in the middle of a forward."""
    pause = Pause(pipe)
    worker = Worker(function)
    assert pause.inside.wait(timeout=60)
    return pause, worker


class TestThreads:
    def test_streams_of_one_transformer_take_turns(self, pipe: ARDiffusionPipeline) -> None:
        """The docs said they do; the second thread's forward was refused, since another one was bound, and its stream
        was closed. Opening one projects text and may swap processors, so it waits too."""
        alone = [latents_of(pipe), latents_of(pipe, OTHER, generator=seed(1))]
        pause, first = paused(pipe, lambda: joined(stream_of(pipe, num_frames=21)))
        second = Worker(lambda: joined(stream_of(pipe, OTHER, 1, num_frames=21)))
        second.join(timeout=0.2)
        assert second.is_alive()
        pause.go.set()
        assert torch.equal(first.result(), alone[0])
        assert torch.equal(second.result(), alone[1])

    def test_pipelines_that_share_a_transformer_take_turns(self, pipe: ARDiffusionPipeline) -> None:
        """Processors are swapped on the transformer, so a lock of each pipeline would not do."""
        twin = ARDiffusionPipeline(**pipe.components, recipe=QUICK)
        alone = latents_of(pipe)
        pause, first = paused(pipe, lambda: joined(stream_of(pipe, num_frames=21)))
        second = Worker(lambda: joined(stream_of(twin, num_frames=21)))
        pause.go.set()
        assert torch.equal(first.result(), alone)
        assert torch.equal(second.result(), alone)

    def test_tasks_of_asyncio_take_turns(self, pipe: ARDiffusionPipeline) -> None:
        """Two viewers at once: one of their streams died in the first chunk."""

        async def collect(value: int) -> torch.Tensor:
            call = {"generator": seed(value), "output_type": "latent", "num_frames": 21}
            async with pipe.astream(PROMPT, **call) as stream:
                return torch.cat([chunk.latents async for chunk in stream], dim=2)

        async def both() -> list[torch.Tensor]:
            return await asyncio.gather(collect(0), collect(1))

        for value, latents in enumerate(asyncio.run(both())):
            assert torch.equal(latents, latents_of(pipe, generator=seed(value)))

    def test_threads_share_a_stream(self, pipe: ARDiffusionPipeline) -> None:
        """The second thread's call failed on the open forward context, closed the stream, and took the pages away from
        the chunk of the first one, which failed too."""
        stream = stream_of(pipe, num_frames=21)
        pause, first = paused(pipe, lambda: list(stream))
        second = Worker(lambda: list(stream))
        pause.go.set()
        chunks = sorted(first.result() + second.result(), key=lambda chunk: chunk.index)
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks], dim=2), latents_of(pipe))

    def test_close_waits_for_the_step_in_flight(self, pipe: ARDiffusionPipeline) -> None:
        """The pages went back to the pool in the middle of a forward, which then wrote into those of the next session."""
        pool = pipe.create_cache()
        stream = stream_of(pipe, cache=pool)
        pause, maker = paused(pipe, lambda: list(stream))
        closer = Worker(stream.close)
        closer.join(timeout=0.2)
        assert closer.is_alive() and not stream.closed
        assert pool.allocator.num_used > 0
        pause.go.set()
        closer.result()
        assert maker.result() == []  # the chunk that was cut short is nobody's
        assert pool.allocator.num_used == 0

    def test_switch_from_another_thread_comes_after_the_chunk(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            expected = [next(stream).latents]
            stream.switch_prompt(OTHER, mode="recache")
            expected.append(next(stream).latents)
        with stream_of(pipe) as stream:
            pause, maker = paused(pipe, lambda: next(stream).latents)
            switcher = Worker(lambda: stream.switch_prompt(OTHER, mode="recache"))
            switcher.join(timeout=0.2)
            assert switcher.is_alive()
            pause.go.set()
            assert torch.equal(maker.result(), expected[0])
            switcher.result()
            assert torch.equal(next(stream).latents, expected[1])

    def test_updates_while_the_stream_ends(self, pipe: ARDiffusionPipeline) -> None:
        """Each one is taken, refused by a full queue, or told that the stream is closed; nothing else, and no hang."""
        from diffusers_ardiff.pipelines.control import EventQueueFullError

        stream = stream_of(pipe, num_frames=21)
        ended = threading.Event()

        def send() -> int:
            refused = 0
            while not ended.is_set() or refused == 0:
                try:
                    stream.update(OTHER)
                except EventQueueFullError:
                    pass
                except RuntimeError as error:
                    assert "closed" in str(error)
                    refused += 1
            return refused

        sender = Worker(send)
        assert len(list(stream)) == 2
        ended.set()
        assert sender.result() >= 1


ORDERS: dict[str, Callable[[ARStream], Any]] = {
    "next": next,
    "switch_prompt": lambda stream: stream.switch_prompt(OTHER),
    "reset": lambda stream: stream.reset(),
    "fork": lambda stream: stream.fork(),
    "offload": lambda stream: stream.offload(),
    "onload": lambda stream: stream.onload(),
    "a step of its batch": lambda stream: StreamBatch([stream]).step(),
}


class TestCallbacks:
    @pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
    @pytest.mark.parametrize("in_batch", [False, True], ids=["alone", "in a batch"])
    def test_no_orders_amid_a_chunk(self, pipe: ARDiffusionPipeline, order: Any, in_batch: bool) -> None:
        """A reset moved the chunk in the middle of its steps to frame 0, a switch changed its text, a fork took noise
        that was drawn for it, all without a word."""

        def callback(*_: Any) -> None:
            with pytest.raises(RuntimeError, match="between two chunks only"):
                order(stream)

        stream = stream_of(pipe, num_frames=21, callback_on_step_end=callback)
        with stream:
            chunks = [StreamBatch([stream]).step()[0] if in_batch else next(stream) for _ in range(2)]
        assert torch.equal(torch.cat([chunk.latents for chunk in chunks], dim=2), latents_of(pipe))

    def test_another_stream_in_a_callback(self, pipe: ARDiffusionPipeline) -> None:
        """The thread has the turn already, and must not wait for itself."""
        inner: list[torch.Tensor] = []
        outer = latents_of(
            pipe, callback_on_step_end=lambda *_: inner.append(latents_of(pipe, generator=seed(1))) or {}
        )
        assert torch.equal(outer, latents_of(pipe))
        assert torch.equal(inner[0], latents_of(pipe, generator=seed(1)))


class TestCopies:
    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_streams_are_not_copied(self, pipe: ARDiffusionPipeline, make: Callable[[Any], Any]) -> None:
        """A shallow copy shared the pages and gave them back when it was collected; the stream then failed."""
        with stream_of(pipe, num_frames=21) as stream:
            first = next(stream).latents
            for each in (stream, pipe.astream(PROMPT)):
                with pytest.raises(TypeError, match=r"can't be copied or pickled.*fork\(\)"):
                    make(each)
            assert torch.equal(torch.cat([first, joined(stream)], dim=2), latents_of(pipe))

    @pytest.mark.parametrize("make", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
    def test_pipelines_are(self, pipe: ARDiffusionPipeline, make: Callable[[Any], Any]) -> None:
        """Also while a stream runs, which goes on, and which the copy knows nothing of."""
        expected = latents_of(pipe)
        with stream_of(pipe, num_frames=21) as stream:
            first = next(stream).latents
            twin = make(pipe)
            assert twin.transformer is not pipe.transformer
            assert torch.equal(latents_of(twin), expected)
            assert torch.equal(torch.cat([first, joined(stream)], dim=2), expected)

    def test_saved_while_it_streams(self, pipe: ARDiffusionPipeline, tmp_path: Any) -> None:
        with stream_of(pipe, num_frames=21) as stream:
            first = next(stream).latents
            pipe.save_pretrained(tmp_path)
            assert torch.equal(torch.cat([first, joined(stream)], dim=2), latents_of(pipe))
        loaded = ARDiffusionPipeline.from_pretrained(tmp_path)
        assert torch.equal(latents_of(loaded), latents_of(pipe))


class TestMovedModels:
    @pytest.mark.parametrize("output_type", ["latent", "np"])
    def test_cast(self, pipe: ARDiffusionPipeline, output_type: str) -> None:
        """``Input type (float) and bias type (BFloat16) should be the same`` came out of a layer, and closed the stream."""
        with stream_of(pipe, num_frames=21, output_type=output_type) as stream:
            chunks = [next(stream).latents]
            pipe.to(torch.bfloat16)
            with pytest.raises(
                RuntimeError, match=r"cast since this stream began.*float32.*bfloat16.*start a new stream"
            ):
                next(stream)
            with pytest.raises(RuntimeError, match="cast since"):
                StreamBatch([stream]).step()
            pipe.to(torch.float32)
            chunks += [chunk.latents for chunk in stream]
        assert len(chunks) == 2

    def test_vae_alone(self, pipe: ARDiffusionPipeline) -> None:
        """Latent streams need no VAE, so theirs may change."""
        with stream_of(pipe, output_type="np") as pixels, stream_of(pipe) as latents:
            next(pixels), next(latents)
            pipe.vae.to(torch.bfloat16)
            next(latents)
            with pytest.raises(RuntimeError, match=r"VAE torch.float32.*VAE torch.bfloat16"):
                next(pixels)

    def test_moved(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream:
            next(stream)
            pipe.to("meta")
            with pytest.raises(RuntimeError, match=r"from cpu .* to meta"):
                next(stream)
