"""Streams for asyncio. No sleeps: a worker thread is held inside a denoise step by an event that the loop sets."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from live_streams import NEW, OLD, live_call, switched_latents
from tiny_components import failing, host_state, latents_of, record_forwards, record_pools

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.pipelines import AsyncARStream


def stream_of(pipe: ARDiffusionPipeline, **call: Any) -> AsyncARStream:
    return pipe.astream(**live_call(**call))


async def take(stream: AsyncARStream, count: int) -> torch.Tensor:
    return torch.cat([(await anext(stream)).latents for _ in range(count)], dim=2)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


class Gate:
    """A step callback that stops the worker at one step until the loop lets it go."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._inside = asyncio.Event()
        self._open = threading.Event()
        self.threads: set[int] = set()

    def __call__(self, _pipe: Any, step: int, *_args: Any) -> None:
        self.threads.add(threading.get_ident())
        if step == self._step:
            self._loop.call_soon_threadsafe(self._inside.set)
            assert self._open.wait(timeout=30), "nobody opened the gate: the loop was blocked"

    async def reached(self) -> None:
        await self._inside.wait()

    def open(self) -> None:
        self._open.set()


class TestChunks:
    @pytest.mark.parametrize("num_frames", [21, 31])
    def test_equal_those_of_the_call(self, pipe: ARDiffusionPipeline, num_frames: int) -> None:
        async def collect() -> list[torch.Tensor]:
            return [chunk.frames async for chunk in stream_of(pipe, num_frames=num_frames)]

        whole = latents_of(pipe, None, prompt_embeds=OLD, num_frames=num_frames)
        assert torch.equal(torch.cat(run(collect()), dim=2), whole)

    def test_loop_stays_free(self, pipe: ARDiffusionPipeline) -> None:
        """The loop runs on while a chunk is in the middle of its steps, in another thread."""

        async def main() -> Gate:
            gate = Gate(step=0)
            async with stream_of(pipe, callback_on_step_end=gate) as stream:
                chunk = asyncio.create_task(anext(stream))
                await gate.reached()
                assert not chunk.done()
                gate.open()
                assert (await chunk).index == 0
            return gate

        assert threading.get_ident() not in run(main()).threads

    def test_opens_without_blocking_and_without_gradients(self, pipe: ARDiffusionPipeline) -> None:
        """Text and given frames are prepared in the worker, where gradients are on unless switched off."""
        threads: list[int] = []

        async def main() -> list[Any]:
            async with pipe.astream("blue", context_latents=given, output_type="latent") as stream:
                assert threads == []
                return [await anext(stream) for _ in range(2)]

        given = torch.randn(1, 16, 1, 4, 6, requires_grad=True)
        handle = pipe.text_encoder.register_forward_hook(lambda *_: threads.append(threading.get_ident()))
        chunks = run(main())
        handle.remove()
        assert len(threads) == 1 and threads[0] != threading.get_ident()
        assert not any(chunk.latents.requires_grad for chunk in chunks)

    def test_two_tasks_share_a_stream(self, pipe: ARDiffusionPipeline) -> None:
        """One chunk at a time, each handed out once."""

        async def main() -> list[int]:
            async with stream_of(pipe) as stream:
                chunks = await asyncio.gather(*(anext(stream) for _ in range(3)))
            return [chunk.index for chunk in chunks]

        assert sorted(run(main())) == [0, 1, 2]

    def test_bad_arguments_are_refused_at_once(self, pipe: ARDiffusionPipeline) -> None:
        with pytest.raises(ValueError, match="num_frames must be a whole number"):
            pipe.astream("blue", num_frames=-1)


class TestUpdate:
    def test_in_flight(self, pipe: ARDiffusionPipeline) -> None:
        async def main() -> torch.Tensor:
            gate = Gate(step=2)
            async with stream_of(pipe, callback_on_step_end=gate) as stream:
                chunks = asyncio.create_task(take(stream, 4))
                await gate.reached()
                assert stream.update(prompt_embeds=NEW, mode="recache", event_id=3)
                assert not stream.update(prompt_embeds=OLD, event_id=3)
                gate.open()
                return await chunks

        assert torch.equal(run(main()), switched_latents(pipe, 2, 2, prompt_embeds=NEW, mode="recache"))

    def test_before_the_stream_is_open(self, pipe: ARDiffusionPipeline) -> None:
        async def main() -> torch.Tensor:
            async with stream_of(pipe) as stream:
                with pytest.raises(ValueError, match="no `control_hook`"):
                    stream.update(controls=1)
                assert stream.update(prompt_embeds=NEW)
                return await take(stream, 2)

        assert torch.equal(run(main()), switched_latents(pipe, 0, 2, prompt_embeds=NEW))

    def test_failing_event_leaves_it_open(self, pipe: ARDiffusionPipeline) -> None:
        async def main() -> torch.Tensor:
            async with stream_of(pipe) as stream:
                first = await take(stream, 1)
                stream.update("blue")
                with failing(pipe.text_encoder, RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
                    await anext(stream)
                assert not stream.closed
                return torch.cat([first, await take(stream, 1)], dim=2)

        assert torch.equal(run(main()), latents_of(pipe, None, prompt_embeds=OLD))


class TestEnd:
    @pytest.mark.parametrize("num_cancels", [1, 3])
    def test_cancelled(self, pipe: ARDiffusionPipeline, manager: KVManager, num_cancels: int) -> None:
        """The step in flight is the last one, and memory is back when the task is over, however often it is told."""
        found = host_state(pipe.transformer)

        async def main() -> tuple[AsyncARStream, int]:
            gate = Gate(step=0)
            stream = stream_of(pipe, cache=manager, callback_on_step_end=gate)
            with record_forwards(pipe.transformer) as forwards:
                task = asyncio.create_task(take(stream, 5))
                await gate.reached()
                assert manager.allocator.num_used > 0
                for _ in range(num_cancels):
                    task.cancel()
                    await asyncio.wait({task}, timeout=0)
                    assert not task.done(), "the worker still uses the memory"
                gate.open()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return stream, len(forwards)

        stream, num_forwards = run(main())
        assert num_forwards == 1
        assert stream.closed and manager.allocator.num_used == 0 and manager.sessions == ()
        assert host_state(pipe.transformer) == found
        with pytest.raises(RuntimeError, match="this stream is closed"):
            stream.update(prompt_embeds=NEW)

    def test_cancelled_while_it_opens(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """Nothing is generated for nobody."""

        async def main() -> tuple[AsyncARStream, int]:
            gate = Gate(step=0)
            handle = pipe.text_encoder.register_forward_hook(lambda *_: gate(None, 0))
            stream = pipe.astream("blue", cache=manager)
            with record_forwards(pipe.transformer) as forwards:
                task = asyncio.create_task(anext(stream))
                await gate.reached()
                task.cancel()
                await asyncio.wait({task}, timeout=0)
                gate.open()
                with pytest.raises(asyncio.CancelledError):
                    await task
            handle.remove()
            return stream, len(forwards)

        stream, num_forwards = run(main())
        assert num_forwards == 0 and stream.closed and manager.allocator.num_used == 0

    def test_end_of_the_loop(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """``asyncio.run`` cancels what is left when its main task ends."""
        gates: list[Gate] = []

        async def main() -> None:
            gates.append(Gate(step=0))
            task = asyncio.create_task(take(stream_of(pipe, cache=manager, callback_on_step_end=gates[0]), 5))
            await gates[0].reached()
            asyncio.get_running_loop().call_soon(gates[0].open)
            assert not task.done()

        asyncio.run(main())
        assert manager.allocator.num_used == 0

    def test_closed_by_another_task(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        """Who waits for the chunk gets the end of the stream, not a chunk that was cut short."""

        async def main() -> list[int]:
            gate = Gate(step=2)
            stream = stream_of(pipe, cache=manager, callback_on_step_end=gate)

            async def iterate() -> list[int]:
                return [chunk.index async for chunk in stream]

            viewer = asyncio.create_task(iterate())
            await gate.reached()
            closing = asyncio.create_task(stream.aclose())
            await asyncio.wait({closing}, timeout=0)
            gate.open()
            await closing
            assert stream.closed
            return await viewer

        assert run(main()) == [0]
        assert manager.allocator.num_used == 0

    @pytest.mark.parametrize("num_chunks", [0, 2])
    def test_closed_twice(self, pipe: ARDiffusionPipeline, manager: KVManager, num_chunks: int) -> None:
        async def main() -> None:
            async with stream_of(pipe, cache=manager) as stream:
                if num_chunks:
                    await take(stream, num_chunks)
                assert not stream.closed
                await stream.aclose()
            assert stream.closed
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

        run(main())
        assert manager.allocator.num_used == 0

    def test_error_closes(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        async def main() -> AsyncARStream:
            stream = stream_of(pipe, cache=manager)
            await take(stream, 1)
            with failing(pipe.transformer.blocks[1], RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
                await anext(stream)
            return stream

        assert run(main()).closed and manager.allocator.num_used == 0

    def test_error_while_it_opens_closes(self, pipe: ARDiffusionPipeline, manager: KVManager) -> None:
        async def main() -> None:
            stream = pipe.astream("blue", cache=manager)
            with failing(pipe.text_encoder, RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
                await anext(stream)
            assert stream.closed
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            with pytest.raises(RuntimeError, match="this stream is closed"):
                stream.update(prompt_embeds=NEW)

        run(main())
        assert manager.allocator.num_used == 0

    def test_dropped_stream_gives_its_pool_back(self, pipe: ARDiffusionPipeline) -> None:
        async def main() -> None:
            async for chunk in stream_of(pipe):
                if chunk.index == 1:
                    break

        with record_pools() as pools:
            run(main())
        gc.collect()
        assert [ref() for ref in pools] == [None]
