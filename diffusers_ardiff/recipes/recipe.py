"""The inference recipe of an autoregressive video checkpoint: chunk, window, steps, shift, commit.

A checkpoint holds weights only; run with another chunk size, window or step list than it was trained for, it
produces noise without any error. A :class:`Recipe` keeps these numbers together, checks them once and travels
as plain JSON. Unit of every ``*_frames`` field: latent frames.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..rope_policies import RopePolicy, make_policy
from ..validation import check_int

MAX_TIMESTEP = 1000.0
LAST_TABLE_STEP = 1.0
CONTEXT_MODES = ("commit", "recompute", "rolling")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one family of autoregressive checkpoints is sampled.

    Attributes:
        name: name shown in errors and in the list of recipes.
        chunk_frames: latent frames generated together.
        first_chunk_frames: size of the first generated chunk when no latents are given; None: `chunk_frames`.
        num_sink_frames: first latent frames that stay visible for ever.
        num_window_frames: most recent latent frames that stay visible, the current chunk included and the sink
            not included; None: the full history.
        max_latent_frames: longest full history; set exactly when `num_window_frames` is None.
        denoising_steps: timesteps before warping, in (0, 1000], strictly decreasing.
        first_chunk_denoising_steps: another step list for the first generated chunk; None: `denoising_steps`.
        shift: flow shift of the warp.
        warp_steps: whether the step lists still have to be warped by `shift`.
        clean_last_step: whether a forward at timestep 0 follows the steps, whose x0 is the output.
        context_mode: how the past reaches a chunk. "commit": a clean forward leaves every chunk's keys behind.
            "recompute": the cache is emptied before each chunk, and the keys of the sink and of the window's past frames
            are computed again from their clean latents, at positions 0, 1, ... "rolling": as "commit", but as many
            chunks as there are steps are denoised in one forward, each one step further than the next; the window then counts
            all of them, so the fewer there are, the more of the past is visible, most of it in the commit.
        encode_first_frame: of "recompute" with a sink of one frame: whether the context's first frame, as soon as the
            video's first lies before the window, is the pixel frame before the context's others, encoded alone.
        commit_timestep: timestep of the clean forward that leaves a chunk's keys and values behind.
        rope_policy: where rotary positions put the sink, one of `ROPE_POLICIES`; see `rope_policies`.
        rope_limit_frames: of the policy "capped", which keeps positions below it; else None.
        fps: pixel frames per second.
        height, width, num_frames: pixel size and pixel frames of a video where the user names none.
        guidance_scale: classifier-free guidance scale; 1.0 means no guidance.
        source: where the numbers come from, and which of them are not certain.

    Raises:
        ValueError: a field is out of range or contradicts another one; the message names the field, the value
            given, what is allowed and what to do.
    """

    name: str
    chunk_frames: int
    first_chunk_frames: int | None = None
    num_sink_frames: int = 0
    num_window_frames: int | None
    max_latent_frames: int | None = None
    denoising_steps: tuple[float, ...]
    first_chunk_denoising_steps: tuple[float, ...] | None = None
    shift: float = 5.0
    warp_steps: bool = True
    clean_last_step: bool = False
    context_mode: str = "commit"
    encode_first_frame: bool = False
    commit_timestep: float = 0.0
    rope_policy: str = "absolute"
    rope_limit_frames: int | None = None
    fps: int = 16
    height: int = 480
    width: int = 832
    num_frames: int = 81
    guidance_scale: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        self._check_texts_and_flags()
        self._check_frame_counts()
        self._check_history()
        self._set("denoising_steps", _checked_steps("denoising_steps", self.denoising_steps))
        if self.first_chunk_denoising_steps is not None:
            steps = _checked_steps("first_chunk_denoising_steps", self.first_chunk_denoising_steps)
            self._set("first_chunk_denoising_steps", steps)
        self._check_numbers()

    def timesteps(self, chunk_index: int = 0) -> tuple[float, ...]:
        """Timesteps handed to the transformer, one a denoise forward, largest first.

        With `warp_steps`, step s becomes ``1000 * shift * x / (1 + (shift - 1) * x)`` with ``x = s / 1000``: the
        flow-matching shift of SD3 (arXiv 2403.03206), as Self-Forcing's `warp_denoising_step` reads it
        from its table. [1000, 750, 500, 250] with shift 5 gives 1000, 937.5, 833.33, 625.

        Args:
            chunk_index: index of the generated chunk, from 0; only chunk 0 can have a step list of its own.

        Raises:
            ValueError: `chunk_index` is negative or not an integer.
        """
        check_int("chunk_index", chunk_index, minimum=0)
        steps = self.denoising_steps
        if chunk_index == 0 and self.first_chunk_denoising_steps is not None:
            steps = self.first_chunk_denoising_steps
        return self._warped(steps) + ((0.0,) if self.clean_last_step else ())

    def sigmas(self, chunk_index: int = 0) -> tuple[float, ...]:
        """Noise levels in (0, 1], `timesteps(chunk_index)` divided by 1000; raises like `timesteps`.

        That of a clean last step is the last one of a table of 1000 steps, 0.00498 with shift 5: the original code looks
        timestep 0 up in that table.
        """
        timesteps = self.timesteps(chunk_index)
        if self.clean_last_step:
            timesteps = timesteps[:-1] + self._warped((LAST_TABLE_STEP,))
        return tuple(timestep / MAX_TIMESTEP for timestep in timesteps)

    def _warped(self, steps: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(_warp(step, self.shift) for step in steps) if self.warp_steps else steps

    def call_guidance(self, guidance_scale: float | None) -> float:
        """The scale of a call that gives this one; None: the recipe's."""
        return self.guidance_scale if guidance_scale is None else guidance_scale

    @property
    def rope(self) -> RopePolicy:
        """The strategy that `rope_policy` names."""
        return make_policy(self.rope_policy, self.rope_limit_frames)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-able values (lists, no tuples); `from_dict` gives back an equal recipe."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Build a recipe from field values, for example parsed JSON.

        Raises:
            ValueError: unknown or missing fields (named, with the known ones), or a field out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        _check_names("Recipe", values, fields)
        required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"Recipe: fields {missing} are missing; required are {required}: add them.")
        return cls(**values)

    def replace(self, **overrides: Any) -> "Recipe":
        """A copy with some fields changed, validated like a new recipe.

        Going from full history to a window takes both fields:
        ``replace(num_window_frames=9, max_latent_frames=None)``.

        Raises:
            ValueError: an unknown field name, or the result is not a valid recipe.
        """
        _check_names("Recipe.replace", overrides, self.to_dict())
        return dataclasses.replace(self, **overrides)

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_texts_and_flags(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name = {self.name!r}: allowed is a non-empty string; write one.")
        if not isinstance(self.source, str):
            raise ValueError(f"source = {self.source!r}: allowed is a string; write where the numbers come from.")
        for field in ("warp_steps", "clean_last_step", "encode_first_frame"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} = {getattr(self, field)!r}: allowed are True and False; write one of them.")
        if self.context_mode not in CONTEXT_MODES:
            raise ValueError(
                f"context_mode = {self.context_mode!r}: allowed is one of {CONTEXT_MODES}; choose from them."
            )
        make_policy(self.rope_policy, self.rope_limit_frames)

    def _check_frame_counts(self) -> None:
        check_int("chunk_frames", self.chunk_frames, minimum=1)
        check_int("num_sink_frames", self.num_sink_frames, minimum=0)
        for field in ("fps", "height", "width", "num_frames"):
            check_int(field, getattr(self, field), minimum=1)
        for field in ("first_chunk_frames", "num_window_frames", "max_latent_frames"):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field), minimum=1)

    def _check_history(self) -> None:
        if (self.num_window_frames is None) == (self.max_latent_frames is None):
            raise ValueError(
                f"num_window_frames = {self.num_window_frames}, max_latent_frames = {self.max_latent_frames}: allowed "
                "is exactly one of them; set num_window_frames for a rolling window and max_latent_frames to None, "
                "or the other way round for the full history up to that many latent frames."
            )
        first = self.chunk_frames if self.first_chunk_frames is None else self.first_chunk_frames
        if self.num_window_frames is not None:
            _check_room("num_window_frames", self.num_window_frames, "chunk_frames", self.chunk_frames)
            room = self.num_window_frames + self.num_sink_frames
            _check_room("num_window_frames + num_sink_frames", room, "first_chunk_frames", first)
        self._check_context_mode()
        if self.rope_limit_frames is not None:
            if self.num_window_frames is None:
                raise ValueError("rope_policy = 'capped' needs a window: set num_window_frames, or take 'absolute'.")
            check_int("rope_limit_frames", self.rope_limit_frames, minimum=1)
            visible = self.num_window_frames + self.num_sink_frames
            _check_room("rope_limit_frames", self.rope_limit_frames, "all that is visible, sink plus window", visible)
        if self.max_latent_frames is not None:
            needed = max(self.chunk_frames, first) + self.num_sink_frames
            _check_room("max_latent_frames", self.max_latent_frames, "the sink plus the largest chunk", needed)

    def _check_context_mode(self) -> None:
        if self.context_mode == "recompute" and self.num_window_frames is None:
            raise ValueError(
                "context_mode = 'recompute' computes the window's past again before each chunk, so it needs a window: "
                "set num_window_frames."
            )
        if self.encode_first_frame and (self.context_mode != "recompute" or self.num_sink_frames != 1):
            raise ValueError(
                f"encode_first_frame = True: allowed with context_mode = 'recompute' and num_sink_frames = 1, got "
                f"{self.context_mode!r} and {self.num_sink_frames}; leave it at False."
            )
        if self.context_mode == "rolling" and self.num_window_frames is not None:
            size = self.num_chunks_at_once * self.chunk_frames
            _check_room("num_window_frames", self.num_window_frames, "all chunks of a rolling window", size)
        others = (self.first_chunk_frames, self.first_chunk_denoising_steps)
        if self.context_mode == "rolling" and (others != (None, None) or self.clean_last_step):
            raise ValueError(
                "context_mode = 'rolling' denoises chunks of one size and one step list together: leave "
                "first_chunk_frames and first_chunk_denoising_steps at None and clean_last_step at False."
            )

    @property
    def num_chunks_at_once(self) -> int:
        """Chunks that one denoise forward holds, at most."""
        return len(self.denoising_steps) if self.context_mode == "rolling" else 1

    def _check_numbers(self) -> None:
        if not _is_number(self.shift) or self.shift <= 0:
            raise ValueError(f"shift = {self.shift!r}: allowed is a finite number above 0; write 1.0 for no shift.")
        if not _is_number(self.commit_timestep) or not 0 <= self.commit_timestep <= MAX_TIMESTEP:
            raise ValueError(
                f"commit_timestep = {self.commit_timestep!r}: allowed is a number from 0 to 1000; write 0.0 for a "
                "clean commit."
            )
        if not _is_number(self.guidance_scale) or self.guidance_scale < 0:
            raise ValueError(
                f"guidance_scale = {self.guidance_scale!r}: allowed is a finite number of at least 0; write 1.0 for "
                "no guidance."
            )
        for field in ("shift", "commit_timestep", "guidance_scale"):
            self._set(field, float(getattr(self, field)))


def window_from_peer(local_attn_size: int, sink_size: int) -> int | None:
    """`num_window_frames` for a window written the way Self-Forcing and LongLive write it.

    They count the sink into the window: `local_attn_size` 12 with `sink_size` 3 is a sink of 3 and a window of 9
    latent frames here. -1 is the full history, here None.

    Raises:
        ValueError: the sizes leave no window.
    """
    check_int("sink_size", sink_size, minimum=0)
    if local_attn_size == -1:
        return None
    is_int = isinstance(local_attn_size, int) and not isinstance(local_attn_size, bool)
    if not is_int or local_attn_size <= sink_size:
        raise ValueError(
            f"local_attn_size = {local_attn_size!r}, sink_size = {sink_size}: allowed is an integer above the sink it "
            "contains, or -1 for the full history; check whether the window was given without its sink."
        )
    return local_attn_size - sink_size


def _warp(step: float, shift: float) -> float:
    x = step / MAX_TIMESTEP
    return MAX_TIMESTEP * (shift * x / (1.0 + (shift - 1.0) * x))


def _checked_steps(field: str, steps: object) -> tuple[float, ...]:
    rule = "allowed are numbers in (0, 1000], strictly decreasing, for example [1000, 750, 500, 250]"
    if not isinstance(steps, (list, tuple)) or not steps:
        raise ValueError(f"{field} = {steps!r}: {rule}; write a list with at least one step.")
    for step in steps:
        if not _is_number(step) or not 0 < step <= MAX_TIMESTEP:
            raise ValueError(f"{field} contains {step!r}: {rule}; write a final 0 as clean_last_step=True.")
    if any(later >= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"{field} = {list(steps)}: {rule}; sort it, largest first, without repeats.")
    return tuple(float(step) for step in steps)


def _check_room(field: str, room: int, content: str, size: int) -> None:
    if room < size:
        raise ValueError(
            f"{field} = {room}: allowed is at least {content} = {size}, since a chunk attends to itself; enlarge it "
            "or use a smaller chunk."
        )


def _check_names(where: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(f"{where}: unknown fields {unknown}; known are {list(known)}: correct or remove them.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
