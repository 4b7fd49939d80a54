"""The formats that ``VideoWriter`` writes: how each one's stream is opened and how a frame goes into it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import Image

_BT709 = 1  # the code of BT.709 primaries and transfer function in ISO/IEC 23091-2
_NUM_COLOURS = 256


@dataclass(frozen=True, kw_only=True)
class VideoFormat:
    """One file format.

    Attributes:
        container, codec, pixels: names that FFmpeg knows them by.
        options: of the encoder.
        takes_odd_sizes: whether height and width may be odd.
    """

    container: str
    codec: str
    pixels: str
    options: dict[str, str]
    takes_odd_sizes: bool

    def open(self, path: str) -> av.container.OutputContainer:
        """A new file at ``path``, whatever its name ends in."""
        return av.open(path, "w", format=self.container)

    def add_stream(self, container: Any, size: tuple[int, int], fps: Fraction, crf: int) -> Any:
        """The container's video stream; ``size`` is (height, width)."""
        options = self.options if self.pixels == "pal8" else {"crf": str(crf), **self.options}
        stream = container.add_stream(self.codec, rate=fps, options=options)
        stream.height, stream.width = size
        stream.pix_fmt = self.pixels
        if self.pixels != "pal8":
            # Untagged files are read as BT.601 by some players and as BT.709 by others, which shifts the colours.
            context = stream.codec_context
            context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
            context.color_primaries = context.color_trc = _BT709
        return stream

    def frame(self, image: NDArray[np.uint8]) -> av.VideoFrame:
        """One frame for the stream, of a uint8 (height, width, 3) image."""
        if self.pixels == "pal8":
            return _palette_frame(image)
        return av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
            format=self.pixels, dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )


# x264's macroblock tree reads memory it never wrote on AVX-512 machines (seen with PyAV 18.1), so that the same
# frames give another file each time. Off costs file size and no quality.
FORMATS = {
    ".mp4": VideoFormat(
        container="mp4", codec="libx264", pixels="yuv420p", options={"mbtree": "0"}, takes_odd_sizes=False
    ),
    ".webm": VideoFormat(
        container="webm",
        codec="libvpx-vp9",
        pixels="yuv420p",
        options={"b": "0", "row-mt": "1", "cpu-used": "4"},
        takes_odd_sizes=True,
    ),
    ".gif": VideoFormat(container="gif", codec="gif", pixels="pal8", options={}, takes_odd_sizes=True),
}


def _palette_frame(image: NDArray[np.uint8]) -> av.VideoFrame:
    """A frame with a palette of its own, the 256 colours that suit it best."""
    picture = Image.fromarray(image).quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
    colours = np.zeros((_NUM_COLOURS, 4), dtype=np.uint8)
    found = np.array(picture.getpalette(), dtype=np.uint8).reshape(-1, 3)
    colours[: len(found), 1:] = found
    colours[:, 0] = 255
    indices_and_palette: Any = (np.asarray(picture), colours)
    return av.VideoFrame.from_ndarray(indices_and_palette, format="pal8")
