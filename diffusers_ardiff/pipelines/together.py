"""Several streams, one forward: each makes its next chunk, whichever frame and prompt it is at."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from .callbacks import ENDED_EARLY
from .calls import NEGATIVE, POSITIVE
from .denoise import Denoiser, FrameStep
from .joint import JointForward, JointRows, prepare_rows
from .output import ARChunk
from .stream import ARStream
from .window import max_past_frames

Result = TypeVar("Result")


class StreamBatchError(RuntimeError):
    """Some streams of a batch failed by themselves; the others made their chunks.

    Attributes:
        chunks: one entry a stream, as ``StreamBatch.step`` would have returned them; None for those that failed.
        errors: what each failed stream raised, by its index in the batch.
    """

    def __init__(self, chunks: Sequence[ARChunk | None], errors: Mapping[int, Exception]) -> None:
        listed = "; ".join(f"stream {index}: {type(e).__name__}: {e}" for index, e in errors.items())
        super().__init__(
            f"{len(errors)} of {len(chunks)} streams failed, the others have chunks in `chunks`. {listed}"
        )
        self.chunks, self.errors = list(chunks), dict(errors)


class StreamBatch:
    """Streams of one pool that make their chunks in joint forwards, one a denoise step, each at its own place in its own video.

        batch = StreamBatch([first, second])
        for stream, chunk in zip(batch.streams, batch.step()):
            show(chunk.frames)

    Each stream keeps its own prompt, position, fill level, noise, guidance, schedule, events and callbacks, and may also
    be used alone between two steps. Streams whose next chunks have different sizes are grouped by size, a forward each.

    Args:
        streams: open, of one pipeline and one pool (``cache=`` of ``pipe.stream``), with frames and prompts of one size.

    Raises:
        ValueError: none, the same one twice, or streams that can't share a forward.
    """

    def __init__(self, streams: Iterable[ARStream]) -> None:
        self._streams: list[ARStream] = []
        self._forward = JointForward()
        for stream in streams:
            self.add(stream)
        if not self._streams:
            raise ValueError("a stream batch needs at least one stream.")

    @property
    def streams(self) -> tuple[ARStream, ...]:
        """Its streams, in the order of ``step``'s chunks."""
        return tuple(self._streams)

    def add(self, stream: ARStream) -> None:
        """Let another stream join.

        Raises:
            ValueError: closed, in the batch already, or of another pipeline, pool, frame size or text length; or its
                guidance branches are on ranks of their own.
        """
        if stream.closed:
            raise ValueError("a closed stream can't join a batch; open a new one.")
        if any(stream is other for other in self._streams):
            raise ValueError("this stream is in the batch already.")
        if stream.rollout.local_names != stream.rollout.branch_names:
            raise ValueError(
                "guidance_parallel=True holds one guidance branch a rank, and a batch runs both in its forwards. Use "
                "enable_parallelism(guidance_parallel=False), with ulysses_degree for several ranks, or ask each stream for "
                "its chunks alone."
            )
        known = next((other for other in self._streams if not other.closed), None)
        if known is not None:
            _check_same(_traits(stream), _traits(known))
        self._streams.append(stream)

    def remove(self, stream: ARStream) -> None:
        """Let a stream leave; it stays open. ValueError if it is not here."""
        self._streams.remove(stream)

    @torch.no_grad()
    def step(self) -> list[ARChunk | None]:
        """The next chunk of every stream, in their order; None for one that has ended or is closed.

        Raises:
            StreamBatchError: streams failed by themselves (an event, a hook, a callback, a decoder). Each of them stands
                as after the same failure in ``next(stream)``; the chunks of the others are in the error.
            Exception: a forward that streams share failed. Nobody is closed, and every stream stands before its chunk
                with the same noise to come, so ``step``, or ``next`` on each, may be called again.
        """
        with ExitStack() as turns:
            for stream in self._streams:
                turns.enter_context(stream._turn.making_chunk())
            return self._step()

    def _step(self) -> list[ARChunk | None]:
        members = [_Member(stream) for stream in self._streams]
        try:
            self._make_chunks(members)
        except Exception as error:
            for index, member in enumerate(members):
                member.rewind()
                if member.error is not None:
                    error.add_note(f"stream {index} had failed by itself: {member.error!r}")
            raise
        except BaseException as error:
            for stream in self._streams:
                stream._fail(error)
            raise
        if any(stream.closed for stream in self._streams):
            self._forward.clear()
        errors = {index: member.error for index, member in enumerate(members) if member.error is not None}
        chunks = [member.chunk for member in members]
        if errors:
            raise StreamBatchError(chunks, errors) from next(iter(errors.values()))
        return chunks

    def _make_chunks(self, members: Sequence[_Member]) -> None:
        self._commit(members)
        for member in members:
            member.begin()
        self._denoise(members)
        for member in members:
            member.finish()

    def _commit(self, members: Sequence[_Member]) -> None:
        """Run the clean forwards that are due, together."""
        steps = [(m, step) for m in members if (step := m.due_commit()) is not None]
        for group in _by_size(steps):
            for name in (POSITIVE, NEGATIVE):
                rows = [(m, step) for m, step in group if name in m.stream.rollout.branch_names]
                self._run(name, rows)
            for member, _ in group:
                member.attempt(member.stream.rollout.agree)
                member.attempt(member.stream.rollout.finish_commit)

    def _denoise(self, members: Sequence[_Member]) -> None:
        """Run denoise steps until every chunk is done."""
        while steps := [(m, m.step) for m in members if m.step is not None]:
            for group in _by_size(steps):
                positive = self._run(POSITIVE, group)
                negative = self._run(NEGATIVE, [(m, step) for m, step in group if m in positive and m.is_guided])
                for member, velocity in positive.items():
                    member.take(velocity, negative.get(member))

    def _run(self, name: str, steps: Sequence[tuple[_Member, FrameStep]]) -> dict[_Member, torch.Tensor]:
        """One forward of these members; those that fail before it are left out."""
        rows: dict[_Member, JointRows] = {}
        for member, step in steps:
            part = member.attempt(prepare_rows, member.stream.rollout, name, step)
            if part is not None:
                rows[member] = part
        outputs: dict[_Member, torch.Tensor] = {}
        for group in _by_text_len(rows):
            if len(group) == 1:
                # Nobody else's forward, so nobody else's failure.
                out = next(iter(group)).attempt(self._forward.run, list(group.values()))
            else:
                out = self._forward.run(list(group.values()))
            if out is not None:
                outputs |= zip(group, out, strict=True)
        return outputs


class _Member:
    """One stream during one step of its batch."""

    def __init__(self, stream: ARStream) -> None:
        self.stream = stream
        self.error: Exception | None = None
        self.chunk: ARChunk | None = None
        self._given: torch.Tensor | None = None
        self._denoiser: Denoiser | None = None
        self._rest, self._num_steps = copy.copy(stream._given), stream.num_steps
        self._noise_state, self._blocks = stream._noise.state(), list(stream._window.blocks)

    def attempt(self, function: Callable[..., Result], *arguments: Any, closes: bool = True) -> Result | None:
        """Call it unless the stream has failed; a failure is this stream's own and, as in ``next``, closes it."""
        if self.error is not None or self.stream.closed:
            return None
        try:
            return function(*arguments)
        except StopIteration as error:
            self.error = RuntimeError(ENDED_EARLY)
            self.error.__cause__ = error
            self.stream._fail(error)
        except Exception as error:
            self.error = error
            if closes:
                self.stream._fail(error)
        return None

    def due_commit(self) -> FrameStep | None:
        """The commit that has to run before the next chunk, where there is a next chunk."""
        self.attempt(self.stream._check_ready, closes=False)
        return self.attempt(_due_commit, self.stream)

    def begin(self) -> None:
        """Apply schedule and events, and begin the next chunk; close the stream at its end."""
        upcoming = self.attempt(self.stream._reach_next_chunk)
        if self.error is not None or self.stream.closed:
            return
        if upcoming is None:
            self.stream.close()
        elif isinstance(upcoming, int):
            self.attempt(self.stream._apply_events, closes=False)
            self._denoiser = self.attempt(self.stream._start_denoising, upcoming)
        else:
            self._given = upcoming

    @property
    def step(self) -> FrameStep | None:
        """The next forward; None where none is left, or the stream failed or was closed."""
        if self.error is not None or self.stream.closed or self._denoiser is None:
            return None
        return self._denoiser.step

    @property
    def is_guided(self) -> bool:
        """Whether the negative branch runs in this step."""
        return NEGATIVE in self.stream.rollout.branch_names and self.stream.state.guidance_scale > 1.0

    def take(self, positive: torch.Tensor, negative: torch.Tensor | None) -> None:
        """Go on with the velocity of this step."""
        velocity = positive
        if negative is not None:
            velocity = negative + self.stream.state.guidance_scale * (positive - negative)
        if self._denoiser is not None:
            self.attempt(self._denoiser.take, velocity)

    def finish(self) -> None:
        """Hand the chunk out."""
        latents = self._given if self._denoiser is None else self._denoiser.latents
        if latents is not None:
            self.chunk = self.attempt(self.stream._hand_out, latents, self._given is not None)

    def rewind(self) -> None:
        """Undo what the chunk drew and counted, so that it can be made again."""
        if self.stream.closed:
            return
        self.stream._given, self.stream.num_steps = self._rest, self._num_steps
        self.stream._noise.rewind(self._noise_state)
        self.stream._window.blocks[:] = self._blocks
        if self._denoiser is not None:
            self.stream._prompt.undo_begin_chunk()


def _due_commit(stream: ARStream) -> FrameStep | None:
    if next(copy.copy(stream._given), None) is None and stream._next_size() is None:
        return None
    return stream.rollout.begin_commit()


def _by_size(steps: Iterable[tuple[_Member, FrameStep]]) -> list[list[tuple[_Member, FrameStep]]]:
    """Steps of as many frames and extra frames each, in groups."""
    groups: dict[tuple[Any, ...], list[tuple[_Member, FrameStep]]] = {}
    for member, step in steps:
        past = max_past_frames(member.stream.rollout.recipe, step.num_frames)
        key = (step.num_frames, step.num_extra_frames, past, isinstance(step.timestep, tuple))
        groups.setdefault(key, []).append((member, step))
    return list(groups.values())


def _by_text_len(rows: Mapping[_Member, JointRows]) -> list[dict[_Member, JointRows]]:
    """Rows whose texts are equally long, in groups: a prompt switch may have brought embeddings of another length."""
    groups: dict[int, dict[_Member, JointRows]] = {}
    for member, part in rows.items():
        groups.setdefault(part.text_len, {})[member] = part
    return list(groups.values())


def _traits(stream: ARStream) -> dict[str, Any]:
    """What streams that share a forward have in common."""
    rollout = stream.rollout
    shape = rollout.shape
    return {
        "transformer": rollout.runner.attachment.transformer,
        "pool": rollout.sessions[0].branches[0].storage,
        "latent size (channels, height, width)": (shape.channels, shape.height, shape.width),
        "text length": stream._settings.rules.text_len,
    }


def _check_same(new: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if value is not known[name] and value != known[name]:
            plain = isinstance(value, (int, tuple))
            numbers = f": {value} instead of {known[name]}" if plain else ""
            raise ValueError(
                f"this stream can't share forwards with those of the batch, it has another {name}{numbers}. Open all of "
                "them from one pipeline with one size and one `cache=pipe.create_cache(num_videos=...)`."
            )
