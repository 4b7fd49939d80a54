"""Data of the built-in tiny model: scenes, captions, tokenizer and the pixel scorer. CPU only."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from tiny.captions import MAX_TOKENS, build_tokenizer, caption_scenes  # noqa: E402
from tiny.evaluate import by_group, frame_grid, make_prompts, truth_score, wanted_colors  # noqa: E402
from tiny.score import motion, right_frames  # noqa: E402
from tiny.shapes import COLORS, HELD_OUT, KINDS, SIZE, Scenes, render, sample_scenes, simulate, spoil_one  # noqa: E402

BUILT_IN = ROOT / "diffusers_ardiff" / "builtin" / "tiny"


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    """600 training scenes."""
    return sample_scenes(600, torch.Generator().manual_seed(0))


def pairs(scenes: Scenes, row: int) -> list[tuple[str, str]]:
    """The (colour, kind) pairs that are present in one scene."""
    here = scenes.present[row]
    colors, kinds = scenes.colors[row][here].tolist(), scenes.kinds[row][here].tolist()
    return [(COLORS[color], KINDS[kind]) for color, kind in zip(colors, kinds, strict=True)]


def test_training_scenes_never_show_a_held_out_pair_and_all_others(scenes: Scenes) -> None:
    shown = {pair for row in range(600) for pair in pairs(scenes, row)}
    assert shown == {(color, kind) for color in COLORS for kind in KINDS} - HELD_OUT


def test_numbers_of_shapes_follow_their_weights() -> None:
    scenes = sample_scenes(400, torch.Generator().manual_seed(0), numbers=(0.1, 0.0, 0.9))
    counts = scenes.present.sum(dim=1)
    assert set(counts.tolist()) == {1, 3}
    assert (counts == 3).float().mean() == pytest.approx(0.9, abs=0.05)
    assert torch.equal(scenes.wanted().sum(dim=1), counts)  # no colour twice


def test_captions_name_exactly_the_pairs_of_the_scene(scenes: Scenes) -> None:
    for row, text in enumerate(caption_scenes(scenes, random.Random(0), empty_share=0.0)):
        named = re.findall(rf"({'|'.join(COLORS)}) ({'|'.join(KINDS)})", text)
        assert sorted(named) == sorted(pairs(scenes, row)), text
        words = re.findall(r"\w+", text)
        assert sum(word in COLORS or word in KINDS for word in words) == 2 * len(named), text


def test_vague_captions_keep_the_colours_and_drop_the_kinds(scenes: Scenes) -> None:
    for row, text in enumerate(caption_scenes(scenes, random.Random(0), empty_share=0.0, vague_share=1.0)):
        assert sorted(re.findall(r"(\w+) shape", text)) == sorted(color for color, _ in pairs(scenes, row)), text
        assert not any(kind in text for kind in KINDS)


def test_captions_fit_the_tokenizer_or_lose_only_their_end(scenes: Scenes) -> None:
    tokenizer = build_tokenizer()
    texts = caption_scenes(scenes, random.Random(1), empty_share=0.0)
    too_long = 0
    for text in texts:
        ids = tokenizer(text, truncation=True).input_ids
        assert len(ids) <= MAX_TOKENS and ids[-1] == tokenizer.eos_token_id
        too_long += len(tokenizer(text, truncation=False).input_ids) > MAX_TOKENS
        kept = tokenizer.decode(ids).split()
        assert all(word in kept for word in re.findall(rf"{'|'.join([*COLORS, *KINDS])}", text)), text
    assert too_long < 0.02 * len(texts)


def test_share_of_empty_captions(scenes: Scenes) -> None:
    captions = caption_scenes(scenes, random.Random(0), empty_share=0.5)
    assert captions.count("") == pytest.approx(300, abs=50)


def test_the_built_in_tokenizer_is_the_one_of_the_data() -> None:
    ours = json.loads(build_tokenizer().backend_tokenizer.to_str())
    shipped = json.loads((BUILT_IN / "tokenizer" / "tokenizer.json").read_text())
    for part in ("model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens"):
        assert shipped[part] == ours[part]


def test_shapes_stay_inside_and_bounce(scenes: Scenes) -> None:
    track = simulate(scenes, 300)
    radius = scenes.radius[:, None, :, None]
    outside = torch.maximum(radius - track, track - (SIZE - radius)).clamp(min=0)
    assert outside[scenes.present[:, None].expand(-1, 300, -1)].max() < 1e-3
    steps = track.diff(dim=1)
    speed = torch.linalg.vector_norm(scenes.velocity, dim=-1)[:, None]
    fits = torch.linalg.vector_norm(steps, dim=-1) <= speed + 1e-3
    assert fits[scenes.present[:, None].expand(-1, 299, -1)].all()
    turned = (steps[:, 1:] * steps[:, :-1] < 0).any(dim=1).any(dim=-1)
    assert turned[scenes.present].all()


def test_shapes_of_a_scene_never_overlap(scenes: Scenes) -> None:
    track = simulate(scenes, 200)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        both = scenes.present[:, i] & scenes.present[:, j]
        distance = torch.linalg.vector_norm(track[both, :, i] - track[both, :, j], dim=-1)
        assert (distance >= (scenes.radius[both, i] + scenes.radius[both, j])[:, None] - 1e-3).all()


def test_lanes_are_rows_or_columns(scenes: Scenes) -> None:
    several = scenes.present.sum(dim=1) > 1
    along = scenes.velocity[several] != 0  # (scenes, slots, x and y)
    rows, columns = along[..., 0].all(dim=1), along[..., 1].all(dim=1)
    assert torch.equal(rows, ~columns) and rows.float().mean() == pytest.approx(0.6, abs=0.06)
    assert (scenes.velocity[~several] != 0).all()  # a single shape moves freely


def test_captions_of_columns_say_so_and_others_mean_rows(scenes: Scenes) -> None:
    """Of a caption without a direction only one arrangement follows, else few denoising steps mix the two."""
    impossible = 0
    for row, text in enumerate(caption_scenes(scenes, random.Random(0), empty_share=0.0)):
        if scenes.present[row].sum() == 1:
            continue
        level, upright = ({*re.findall(words, text)} for words in (r"\b(?:left|right)\b", r"\b(?:up|down)\b"))
        if scenes.velocity[row, 0, 0] == 0:
            assert upright and not level, text
        else:
            assert level or not upright, text
            impossible += bool(upright)
    assert impossible > 20


def test_scorer_agrees_with_rendered_scenes() -> None:
    score = truth_score(count=40, num_frames=33, seed=3)
    assert score["right_frames"] >= 99
    assert 0.4 < score["motion"] < 0.9  # pixels per frame, the speeds that scenes are drawn with


def test_lanes_follow_the_order_of_the_caption(scenes: Scenes) -> None:
    for row, text in enumerate(caption_scenes(scenes, random.Random(0), empty_share=0.0)):
        here = scenes.present[row]
        across = 1 if scenes.velocity[row, 0, 1] == 0 else 0
        assert (scenes.position[row, here, across].diff() > 0).all()
        named = re.findall("|".join(COLORS), text)
        assert named == [COLORS[color] for color in scenes.colors[row, here]], text


def test_spoiled_scenes_have_one_mistake_and_hold_nothing_that_training_may_not_see(scenes: Scenes) -> None:
    twins = spoil_one(scenes, torch.Generator().manual_seed(1))
    recolored, toggled = twins.colors != scenes.colors, twins.present != scenes.present
    assert torch.equal((recolored | toggled).sum(dim=1), torch.ones(600, dtype=torch.long))
    assert scenes.present[recolored].all()
    assert torch.equal(twins.kinds[~recolored], scenes.kinds[~recolored])
    assert not {pair for row in range(600) for pair in pairs(twins, row)} & HELD_OUT
    assert twins.present.any(dim=1).all()
    assert torch.equal(twins.wanted().sum(dim=1), twins.present.sum(dim=1))  # no colour twice
    number = scenes.present.sum(dim=1)
    lost, extra = (twins.present.sum(dim=1) - number == step for step in (-1, 1))
    assert lost[number > 1].float().mean() == pytest.approx(0.5, abs=0.06)
    assert extra[number < 3].float().mean() == pytest.approx(0.1, abs=0.05)


def test_scorer_sees_a_missing_a_wrong_and_an_extra_colour(scenes: Scenes) -> None:
    some = scenes.select(torch.arange(20))
    video = render(some, simulate(some, 5))
    wanted = some.wanted()
    assert right_frames(video, wanted).float().mean() > 0.97
    for color in range(len(COLORS)):
        changed = wanted.clone()
        changed[:, color] = ~changed[:, color]
        assert right_frames(video, changed).float().mean() < 0.03
    assert not right_frames(torch.full_like(video, -0.85), wanted).any()


def test_motion_of_a_still_and_of_a_moving_square() -> None:
    video = torch.full((2, 3, 6, 64, 64), -0.85)
    red = torch.tensor([0.9, -0.8, -0.8]).view(3, 1, 1)
    for frame in range(6):
        video[0, :, frame, 10:20, 10:20] = red
        video[1, :, frame, 10:20, 10 + 2 * frame : 20 + 2 * frame] = red
    assert motion(video).tolist() == pytest.approx([0, 2])


def test_prompts_are_half_held_out_and_deterministic() -> None:
    prompts = make_prompts(60, seed=0)
    assert prompts == make_prompts(60, seed=0)
    assert [prompt.number for prompt in prompts[:6]] == [1, 1, 2, 2, 3, 3]
    held = {f"{color} {kind}" for color, kind in HELD_OUT}
    for index, prompt in enumerate(prompts):
        assert prompt.held_out == any(pair in prompt.text for pair in held) == (index % 2 == 1)
        assert {color for color in COLORS if color in prompt.text} == prompt.colors
    assert torch.equal(wanted_colors(prompts).sum(dim=1), torch.tensor([prompt.number for prompt in prompts]))


def test_groups_of_a_report() -> None:
    prompts = make_prompts(6, seed=0)
    right = torch.tensor([[True, True], [False, False], [True, False], [True, True], [True, True], [True, True]])
    assert by_group(right, prompts) == {
        "all": 75.0,
        "seen": 83.33,
        "held_out": 66.67,
        "1_shapes": 50.0,
        "2_shapes": 75.0,
        "3_shapes": 100.0,
    }


def test_frame_grid_has_one_row_a_clip() -> None:
    image = frame_grid(torch.rand(2, 12, 3, 64, 64), columns=4, scale=1.5)
    assert image.size == (4 * 66 * 1.5, 2 * 66 * 1.5)
