"""Scores generated videos: asked prompts, the public pipeline, pixels out."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from diffusers_ardiff import ARDiffusionPipeline

from .captions import DIRECTIONS, join
from .score import motion, right_frames
from .shapes import ASKED_KINDS, COLORS, HELD_OUT, MAX_SHAPES, render, sample_scenes, simulate


@dataclass(frozen=True)
class Prompt:
    """A caption, the set of colours it asks for, and whether a (colour, kind) pair in it was never trained on."""

    text: str
    colors: frozenset[str]
    held_out: bool

    @property
    def number(self) -> int:
        """Number of shapes."""
        return len(self.colors)


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """Seen and held-out prompts in turn, with one, two and three shapes in turn."""
    rng = random.Random(seed)
    return [_make_prompt(1 + index // 2 % MAX_SHAPES, index % 2 == 1, rng) for index in range(count)]


def _make_prompt(number: int, held_out: bool, rng: random.Random) -> Prompt:
    """A prompt of `number` shapes; a held-out one has exactly one held-out pair."""
    held = sorted(HELD_OUT)
    seen = [(color, kind) for color in COLORS for kind in ASKED_KINDS if (color, kind) not in HELD_OUT]
    pairs: list[tuple[str, str]] = []
    while len({color for color, _ in pairs}) != number:
        pairs = rng.sample(seen, number - held_out) + ([rng.choice(held)] if held_out else [])
    rng.shuffle(pairs)
    endings = [f" moving {rng.choice(DIRECTIONS)}" if rng.random() < 0.5 else "" for _ in pairs]
    phrases = [f"a {color} {kind}{ending}" for (color, kind), ending in zip(pairs, endings, strict=True)]
    return Prompt(join(phrases, rng), frozenset(color for color, _ in pairs), held_out)


def wanted_colors(prompts: Sequence[Prompt]) -> torch.Tensor:
    """(prompts, colours) bool."""
    return torch.tensor([[color in prompt.colors for color in COLORS] for prompt in prompts])


def truth_score(count: int, num_frames: int, seed: int) -> dict[str, float]:
    """The same figures for `count` rendered scenes: what a perfect model would get."""
    generator = torch.Generator().manual_seed(seed)
    right, moved = [], []
    for _ in range(0, count, 10):
        scenes = sample_scenes(10, generator)
        video = render(scenes, simulate(scenes, num_frames))
        right.append(right_frames(video, scenes.wanted()))
        moved.append(motion(video))
    return {"right_frames": percent(torch.cat(right)), "motion": round(torch.cat(moved).nanmean().item(), 2)}


def generators(prompts: Sequence[Prompt], seed: int) -> list[torch.Generator]:
    """One generator a prompt, so that the batch size does not matter."""
    return [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]


def score_clips(
    pipe: ARDiffusionPipeline, prompts: Sequence[Prompt], num_frames: int, batch: int, seed: int
) -> tuple[dict[str, object], list[torch.Tensor]]:
    """Generates one clip a prompt; returns the report and every clip's frames as (F, 3, H, W) in [0, 1]."""
    right, moved, clips = [], [], []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        texts = [prompt.text for prompt in part]
        frames = (
            pipe(texts, num_frames=num_frames, generator=generators(part, seed + start), output_type="pt")
            .frames.float()
            .cpu()
        )
        video = as_video(frames)
        right.append(right_frames(video, wanted_colors(part)))
        moved.append(motion(video))
        clips.extend(frames)
        print(f"{start + len(part)} of {len(prompts)} clips: {percent(torch.cat(right))} % right", flush=True)
    report = by_group(torch.cat(right), prompts)
    report["motion"] = round(torch.cat(moved).nanmean().item(), 2)
    report["wrong_prompts"] = [
        {"text": prompt.text, "right_frames": percent(row)}
        for prompt, row in zip(prompts, torch.cat(right), strict=True)
        if not row.all()
    ]
    return report, clips


def by_group(right: torch.Tensor, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Right frames (prompts, F) in percent: all, seen, held-out, and by number of shapes."""
    held = torch.tensor([prompt.held_out for prompt in prompts])
    number = torch.tensor([prompt.number for prompt in prompts])
    groups = {"all": torch.ones_like(held), "seen": ~held, "held_out": held}
    groups |= {f"{n}_shapes": number == n for n in range(1, MAX_SHAPES + 1)}
    return {name: percent(right[rows]) for name, rows in groups.items() if rows.any()}


def score_rollout(
    pipe: ARDiffusionPipeline, prompts: Sequence[Prompt], num_frames: int, last_frames: int, seed: int
) -> dict[str, object]:
    """Streams one long batch and scores the first 81 and the last `last_frames` frames, holding one chunk at a time."""
    texts, wanted = [prompt.text for prompt in prompts], wanted_colors(prompts)
    early, late, tail, done = [], [], [], 0
    with pipe.stream(texts, num_frames=num_frames, generator=generators(prompts, seed), output_type="pt") as stream:
        for chunk in stream:
            video = as_video(chunk.frames.float().cpu())
            right, index = right_frames(video, wanted), done + torch.arange(video.shape[2])
            early.append(right[:, index < 81])
            late.append(right[:, index >= num_frames - last_frames])
            if (index >= num_frames - last_frames).any():
                tail.append(motion(video))
            done += video.shape[2]
    return {
        "frames": done,
        "first_81": by_group(torch.cat(early, 1), prompts),
        f"last_{last_frames}": by_group(torch.cat(late, 1), prompts),
        "right_by_prompt": {
            prompt.text: percent(row) for prompt, row in zip(prompts, torch.cat(late, 1), strict=True)
        },
        "motion_at_end": round(torch.stack(tail).nanmean().item(), 2),
    }


def as_video(frames: torch.Tensor) -> torch.Tensor:
    """(B, F, 3, H, W) in [0, 1] -> (B, 3, F, H, W) in [-1, 1]."""
    return frames.transpose(1, 2) * 2 - 1


def frame_grid(clips: Iterable[torch.Tensor], columns: int, scale: float) -> Image.Image:
    """One row a clip (F, 3, H, W) in [0, 1], `columns` frames evenly over time, cells `scale` times as large."""
    rows = []
    for clip in clips:
        cells = clip[torch.linspace(0, len(clip) - 1, columns).round().long()]
        rows.append(torch.cat(list(torch.nn.functional.pad(cells, (1, 1, 1, 1), value=0.4)), dim=-1))
    pixels = (torch.cat(rows, dim=-2).permute(1, 2, 0) * 255).round().byte().numpy()
    image = Image.fromarray(pixels)
    return image.resize((round(scale * image.width), round(scale * image.height)), Image.Resampling.BICUBIC)


def percent(right: torch.Tensor) -> float:
    """Share of true values in percent, two decimals."""
    return round(100 * right.float().mean().item(), 2)
