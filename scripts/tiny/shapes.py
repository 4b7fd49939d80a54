"""Scenes of one to three coloured shapes, rendered in batches on any device.

Shapes move at constant speed and bounce off the walls. Where there are several, each has a lane of its own: rows, in
which they move left and right, or columns, in which they move up and down, in the order of the caption. So they never
overlap, every colour stays visible, and the caption alone tells where each of them is to be found, in a first chunk,
which has no history, and after thousands. All open near the middle of their lanes. A single shape moves freely.
Lengths are pixels, times are frames, colours are RGB in [-1, 1]. `x` grows to the right, `y` grows downwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

SIZE = 64
FPS = 16
MAX_SHAPES = 3
BACKGROUND = -0.85
TOLERANCE = 0.6  # how far from a palette colour a pixel still counts as that colour
_ON, _OFF = 0.9, -0.8
PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (_ON, _OFF, _OFF),
    "green": (_OFF, _ON, _OFF),
    "blue": (_OFF, _OFF, _ON),
    "yellow": (_ON, _ON, _OFF),
    "magenta": (_ON, _OFF, _ON),
    "cyan": (_OFF, _ON, _ON),
}
COLORS: tuple[str, ...] = tuple(PALETTE)
KINDS: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "cross")
ASKED_KINDS = KINDS[:3]  # by the scorer; the others show in training that any colour goes with any kind
# Never rendered for training; the scorer asks for them. Every colour and every kind is still seen otherwise.
HELD_OUT: frozenset[tuple[str, str]] = frozenset({("red", "triangle"), ("blue", "circle"), ("yellow", "square")})

TINTED_SHARE = 0.25  # of the shapes, in training; see `sample_scenes`
OPENING_JITTER = 3  # pixels; see `_openings`
ROWS_SHARE = 0.6  # of the scenes of several shapes; a caption without a direction means rows
NUMBERS = (0.2, 0.35, 0.45)  # weights of scenes of one, two and three shapes


@dataclass(frozen=True)
class Scenes:
    """First frames of N scenes with S = 3 slots each; slots that are not `present` are empty.

    colors, kinds: (N, S) indices into `COLORS` and `KINDS`; tints: (N, S, 3), what they are painted with, and tinted:
    (N, S) bool, where that is no palette colour; present: (N, S) bool; radius: (N, S) pixels; position: (N, S, 2)
    pixels; velocity: (N, S, 2) pixels per frame, along x in rows, along y in columns.
    """

    colors: torch.Tensor
    kinds: torch.Tensor
    tints: torch.Tensor
    tinted: torch.Tensor
    present: torch.Tensor
    radius: torch.Tensor
    position: torch.Tensor
    velocity: torch.Tensor

    def wanted(self) -> torch.Tensor:
        """Which colours are present: (N, colours) bool."""
        table = torch.zeros(len(self.colors), len(COLORS), device=self.colors.device)
        return table.scatter_add_(1, self.colors, self.present.float()).bool()

    def select(self, rows: torch.Tensor) -> "Scenes":
        """The scenes at `rows`."""
        return Scenes(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})


def training_pairs() -> torch.Tensor:
    """Which (colour, kind) pairs training may show, as a (colours, kinds) float table of ones and zeros."""
    return torch.tensor([[float((color, kind) not in HELD_OUT) for kind in KINDS] for color in COLORS])


def sample_scenes(
    count: int,
    generator: torch.Generator,
    pairs: torch.Tensor | None = None,
    numbers: Sequence[float] = NUMBERS,
    tinted_share: float = 0.0,
) -> Scenes:
    """Draws scenes on the generator's device.

    `pairs` weights the (colour, kind) pairs (default: those of training), `numbers` one, two and three shapes. A share
    of `tinted_share` of the shapes is painted with any colour instead of its own, so that no kind comes to mean that
    it has not a certain colour; never with one near a colour that is held out for the kind.
    """
    device = generator.device
    pairs = (training_pairs() if pairs is None else pairs).to(device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator, device=device)

    colors = uniform(len(COLORS)).argsort(dim=1)[:, :MAX_SHAPES]
    kinds = torch.multinomial(pairs[colors].flatten(0, 1), 1, generator=generator).view(count, MAX_SHAPES)
    number = torch.multinomial(torch.tensor(numbers, device=device), count, replacement=True, generator=generator)
    present = torch.arange(MAX_SHAPES, device=device) <= number[:, None]
    radius = 7 + 2 * uniform(MAX_SHAPES)
    speed = 0.4 + 0.5 * uniform(MAX_SHAPES)
    velocity = speed[..., None] * _directions(number, uniform(MAX_SHAPES), uniform(1) < ROWS_SHARE)
    position = _openings(radius, number + 1, velocity, uniform(MAX_SHAPES, 2))
    tints = _OFF + (_ON - _OFF) * uniform(MAX_SHAPES, 3)
    tinted = (uniform(MAX_SHAPES) < tinted_share) & ~_near_held_out(tints, kinds) & (tints.amax(dim=-1) > 0)
    tints = torch.where(tinted[..., None], tints, palette(device)[colors])
    return Scenes(colors, kinds, tints, tinted, present, radius, position, velocity)


def palette(device: torch.device) -> torch.Tensor:
    """The colours as (colours, 3) RGB."""
    return torch.tensor(list(PALETTE.values()), device=device)


def _near_held_out(tints: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Which tints (N, S, 3) the scorer would take for a colour that is held out for the kind: (N, S) bool."""
    distance = torch.linalg.vector_norm(tints[:, :, None] - palette(tints.device), dim=-1)
    held_out = training_pairs().to(tints.device).T[kinds] == 0
    return ((distance < TOLERANCE) & held_out).any(dim=-1)


def spoil_one(scenes: Scenes, generator: torch.Generator) -> Scenes:
    """The same scenes with one mistake each, as a model may make it: a shape recoloured, missing, or one too many.

    Half of the scenes lose a shape (what long rollouts do most), a tenth gets a further one. The others are recoloured,
    with a colour from outside the scene and a fitting kind; never a pair that is held out. A scene that is full gets no
    further shape and a lone shape does not go: these are recoloured, too. Scenes whose chosen shape is tinted stay as
    they are: their captions could not tell what it has to become.
    """
    count, device = len(scenes.colors), generator.device
    number = scenes.present.sum(dim=1, keepdim=True)
    slot = (torch.rand(count, 1, generator=generator, device=device) * number).long()
    mistake = torch.rand(count, 1, generator=generator, device=device)
    lost, extra = (mistake < 0.5) & (number > 1), (mistake > 0.9) & (number < MAX_SHAPES)
    chosen = torch.zeros_like(scenes.present).scatter(1, slot, True)
    added = torch.zeros_like(scenes.present).scatter(1, number.clamp(max=MAX_SHAPES - 1), True)
    present = (scenes.present & ~(lost & chosen)) | (extra & added)
    changed = chosen & ~scenes.tinted & ~lost & ~extra
    return replace(_recolor(scenes, changed, generator), present=present)


def _recolor(scenes: Scenes, changed: torch.Tensor, generator: torch.Generator) -> Scenes:
    """The scenes with a free colour and a kind that training shows with it for the one slot `changed` (N, S) of each."""
    device = generator.device
    free = torch.ones(len(changed), len(COLORS), device=device).scatter_(1, scenes.colors, 0.0)
    color = torch.multinomial(free, 1, generator=generator)
    kind = torch.multinomial(training_pairs().to(device)[color[:, 0]], 1, generator=generator)
    colors, kinds = torch.where(changed, color, scenes.colors), torch.where(changed, kind, scenes.kinds)
    tints = torch.where(scenes.tinted[..., None], scenes.tints, palette(device)[colors])
    return replace(scenes, colors=colors, kinds=kinds, tints=tints)


def _directions(number: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Unit vectors (N, S, 2): any for a single shape (`number` 0), else along the lanes, which are rows or columns.

    number: (N,), one less than the shapes; uniform: (N, S) in [0, 1]; rows: (N, 1) bool.
    """
    angle = 2 * torch.pi * uniform
    free = torch.stack([angle.cos(), angle.sin()], dim=-1)
    sign = torch.where(uniform < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(sign)
    lanes = torch.where(rows[..., None], torch.stack([sign, zero], dim=-1), torch.stack([zero, sign], dim=-1))
    return torch.where((number == 0)[:, None, None], free, lanes)


def _openings(
    radius: torch.Tensor, count: torch.Tensor, velocity: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """First positions: up to `OPENING_JITTER` from the middle of each shape's lane, and inside it.

    count: (N,) shapes; velocity: (N, S, 2), along the lanes; uniform: (N, S, 2) in [0, 1]. Slots beyond `count` get any
    place. Returns (N, S, 2) pixels.
    """
    slot = torch.arange(MAX_SHAPES, device=radius.device)
    lane = SIZE * (slot + 0.5) / count[:, None]
    room = (SIZE / (2 * count[:, None]) - radius).clamp(0, OPENING_JITTER)
    jitter = 2 * uniform - 1
    along = SIZE / 2 + OPENING_JITTER * jitter[..., 0]
    across = torch.where(slot < count[:, None], lane + room * jitter[..., 1], 10 + (SIZE - 20) * uniform[..., 1])
    rows = velocity[..., 1] == 0
    return torch.stack([torch.where(rows, along, across), torch.where(rows, across, along)], dim=-1)


def simulate(scenes: Scenes, num_frames: int) -> torch.Tensor:
    """Centres of all shapes over time: (N, num_frames, S, 2) pixels."""
    position, velocity = scenes.position.clone(), scenes.velocity.clone()
    low, high = scenes.radius[..., None], SIZE - scenes.radius[..., None]
    track = []
    for _ in range(num_frames):
        track.append(position)
        position = position + velocity
        outside = ((position < low) & (velocity < 0)) | ((position > high) & (velocity > 0))
        velocity = torch.where(outside, -velocity, velocity)
        position = torch.where(position < low, 2 * low - position, position)
        position = torch.where(position > high, 2 * high - position, position)
    return torch.stack(track, dim=1)


def render(scenes: Scenes, track: torch.Tensor) -> torch.Tensor:
    """Anti-aliased video of the centres `track` (N, F, S, 2): (N, 3, F, 64, 64) in [-1, 1]."""
    count, num_frames = track.shape[:2]
    device = track.device
    grid = torch.arange(SIZE, device=device) + 0.5
    video = torch.full((count, 3, num_frames, SIZE, SIZE), BACKGROUND, device=device)
    for slot in range(MAX_SHAPES):
        x = grid - track[:, :, slot, 0, None, None]
        y = grid[:, None] - track[:, :, slot, 1, None, None]
        radius, kind = (values[:, slot, None, None, None] for values in (scenes.radius, scenes.kinds))
        coverage = _coverage(x, y, radius, kind) * scenes.present[:, slot, None, None, None]
        color = scenes.tints[:, slot, :, None, None, None]
        video = torch.lerp(video, color.expand_as(video), coverage[:, None].expand_as(video))
    return video


def _coverage(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Share of each pixel that a shape of `radius` around (0, 0) covers; x: (N, F, 1, W), y: (N, F, H, 1)."""
    circle = radius - torch.sqrt(x * x + y * y)
    square = 0.85 * radius - torch.maximum(x.abs(), y.abs())
    # An upright triangle: apex (0, -r), base at y = 0.65 r between x = -0.95 r and 0.95 r.
    slant = (0.95**2 + 1.65**2) ** 0.5
    sides = (0.95 * (y + radius) - 1.65 * x.abs()) / slant
    triangle = torch.minimum(sides, 0.65 * radius - y)
    diamond = (1.15 * radius - x.abs() - y.abs()) / 2**0.5
    arm = 0.4 * radius
    cross = torch.maximum(
        torch.minimum(radius - x.abs(), arm - y.abs()), torch.minimum(arm - x.abs(), radius - y.abs())
    )
    inside = circle
    for index, other in enumerate((square, triangle, diamond, cross), start=1):
        inside = torch.where(kind == index, other, inside)
    return (inside + 0.5).clamp(0, 1)
