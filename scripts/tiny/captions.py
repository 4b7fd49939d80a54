"""Captions of scenes, and the word-level tokenizer that reads them."""

import random
import re
from collections.abc import Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .shapes import COLORS, HELD_OUT, KINDS, Scenes

MAX_TOKENS = 24
DIRECTIONS = ("right", "down", "left", "up")
_ARTICLES = ("a", "a", "a", "one", "the", "")
_MOTIONS = ("moving", "moving", "going", "drifting", "flying")
_UNKNOWN = ("shiny", "small", "bright", "plain")  # not in the vocabulary: they teach the model to skip <unk>
_OPENINGS = ("", "", "", "a video of ", "there is ", "an animation of ")
_ENDINGS = ("", "", "", ".", " on a black background")
_IMPOSSIBLE_SHARE = 0.3  # of the captions of rows; see `caption_scenes`
_EXTRA_WORDS = (
    "and with next to beside of is there video animation an on in black dark background moves slowly towards "
    "the shape shapes two three"
)
_PAIR = re.compile(rf"\b({'|'.join(COLORS)}) ({'|'.join((*KINDS, 'shape'))})\b")


def vocabulary() -> list[str]:
    """All known tokens, special ones first; the index of a token is its id."""
    words = {*COLORS, *KINDS, *DIRECTIONS, *_ARTICLES, *_MOTIONS, *_EXTRA_WORDS.split(), ".", ","} - {""}
    return ["<pad>", "</s>", "<unk>", *sorted(words)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer that splits off punctuation and ends every text with `</s>`."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
    )


def join(phrases: Sequence[str], rng: random.Random) -> str:
    """Joins one to three noun phrases in one of several ways."""
    if len(phrases) == 1:
        return phrases[0]
    if len(phrases) == 2:
        return phrases[0] + rng.choice([" and ", " and ", ", ", " with ", " next to ", " beside "]) + phrases[1]
    middle, last = rng.choice([(", ", " and "), (", ", ", and "), (", ", ", "), (" and ", " and "), (" ", " and ")])
    return phrases[0] + middle + phrases[1] + last + phrases[2]


def noun_phrase(color: str | None, kind: str, direction: str | None, rng: random.Random) -> str:
    """For example "a red circle moving right"; None leaves the colour or the motion out."""
    words = [rng.choice(_ARTICLES), rng.choice(_UNKNOWN) if rng.random() < 0.05 else "", color or "", kind]
    if direction is not None:
        words += [rng.choice(_MOTIONS), direction]
    return " ".join(word for word in words if word)


def caption_scenes(
    scenes: Scenes, rng: random.Random, empty_share: float = 0.05, vague_share: float = 0.0
) -> list[str]:
    """One caption a scene: its shapes from top to bottom or from left to right, each with or without its direction.

    Directions are those of the first frame. A caption of columns states one at least, so that without any the shapes
    are in rows; one of rows, beside a shape that moves left or right, may send another one up or down, which is not
    possible and counts for nothing. A share of `empty_share` is empty, so that the model also knows what "no prompt"
    means. A share of `vague_share` of the phrases says "shape" in place of the kind, so that colour words get to work
    without a kind they are known with. Tinted shapes are named without a colour.
    """
    colors, kinds, present = scenes.colors.tolist(), scenes.kinds.tolist(), scenes.present.tolist()
    tinted = scenes.tinted.tolist()
    captions = []
    for row, motion in enumerate(scenes.velocity.tolist()):
        slots = [slot for slot, here in enumerate(present[row]) if here]
        phrases = [
            noun_phrase(
                None if tinted[row][slot] else COLORS[colors[row][slot]],
                "shape" if rng.random() < vague_share else KINDS[kinds[row][slot]],
                direction,
                rng,
            )
            for slot, direction in zip(slots, _stated_directions([motion[slot] for slot in slots], rng), strict=True)
        ]
        ending = rng.choice(_ENDINGS) if len(phrases) < 3 else rng.choice(("", "."))
        text = rng.choice(_OPENINGS) + join(phrases, rng) + ending
        captions.append("" if rng.random() < empty_share else text)
    return captions


def _stated_directions(velocities: Sequence[Sequence[float]], rng: random.Random) -> list[str | None]:
    """Direction words of the shapes of one scene, None where nothing is said; see `caption_scenes`."""
    words = [direction_word(*velocity) for velocity in velocities]
    stated = [word if rng.random() < 0.5 else None for word in words]
    if len(words) == 1:
        return stated
    chosen = rng.randrange(len(words))
    if velocities[0][0] == 0:
        stated[chosen] = words[chosen]
    elif rng.random() < _IMPOSSIBLE_SHARE and any(stated[:chosen] + stated[chosen + 1 :]):
        stated[chosen] = rng.choice(("up", "down"))
    return stated


def other_colors(text: str, rng: random.Random) -> str:
    """The caption with other colours, as if it told of another scene; never a pair that is held out."""
    return _PAIR.sub(lambda m: f"{rng.choice([c for c in COLORS if (c, m[2]) not in HELD_OUT])} {m[2]}", text)


def other_kinds(text: str, rng: random.Random) -> str:
    """The caption with other kinds; never a pair that is held out."""
    return _PAIR.sub(lambda m: f"{m[1]} {rng.choice([k for k in KINDS if (m[1], k) not in HELD_OUT])}", text)


def direction_word(x: float, y: float) -> str:
    """The main direction of a velocity (x right, y down)."""
    if abs(x) >= abs(y):
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up"
