"""Video files: what is promised about rate, count and colours, and that no broken file ever takes the final name."""

from __future__ import annotations

import ctypes
import errno
import platform
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_ardiff.video_io import VideoWriter, read_image, read_video, save_contact_sheet, save_png_atomic


def make_frames(count: int = 9, height: int = 32, width: int = 48) -> np.ndarray:
    """A bright bar that moves one step a frame over a gradient."""
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    frames[..., 1] = np.linspace(0, 200, width, dtype=np.uint8)
    for index, frame in enumerate(frames):
        left = index % (width - 8)
        frame[:, left : left + 8, 0] = 255
    return frames


def write(path: Path, frames: np.ndarray, fps: float = 16, chunk: int | None = None) -> None:
    with VideoWriter(path, fps) as writer:
        for start in range(0, len(frames), chunk or len(frames)):
            writer.write(frames[start : start + (chunk or len(frames))])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "video.mp4"


class TestVideoWriter:
    @pytest.mark.parametrize(
        ("fps", "rate", "seconds"),
        [
            (16, Fraction(16), 5.0625),
            (24, Fraction(24), 3.375),
            (24.0, Fraction(24), 3.375),
            (24000 / 1001, Fraction(24000, 1001), 81 * 1001 / 24000),
            (Fraction(30000, 1001), Fraction(30000, 1001), 81 * 1001 / 30000),
            (0.5, Fraction(1, 2), 162.0),
        ],
    )
    def test_rate_count_and_duration(self, target: Path, fps: float, rate: Fraction, seconds: float) -> None:
        """Seen elsewhere: a literal fps in the exporter made videos play at the wrong speed."""
        write(target, make_frames(81), fps, chunk=12)
        with av.open(str(target)) as container:
            stream = container.streams.video[0]
            assert (stream.average_rate, stream.frames) == (rate, 81)
            assert container.duration / av.time_base == pytest.approx(seconds, abs=0.002)
            assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        frames, read_fps = read_video(target)
        assert len(frames) == 81 and read_fps == pytest.approx(float(rate))

    @pytest.mark.parametrize(("height", "width"), [(472, 840), (2, 2), (34, 18)])
    def test_size_is_kept(self, target: Path, height: int, width: int) -> None:
        """Seen elsewhere: sizes that are no multiple of 16 were rescaled."""
        write(target, torch.full((3, height, width, 3), 0.5, dtype=torch.bfloat16))
        frames = read_video(target)[0]
        assert frames.shape == (3, height, width, 3) and np.abs(frames.astype(int) - 128).max() <= 3

    def test_frames_come_back_in_order(self, target: Path) -> None:
        frames = make_frames(30)
        write(target, frames, chunk=7)
        error = np.abs(read_video(target)[0].astype(int)[:, None] - frames.astype(int)[None]).mean(axis=(2, 3, 4))
        assert (error.argmin(axis=1) == np.arange(30)).all()

    @pytest.mark.parametrize(
        "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (20, 200, 90)], ids=str
    )
    def test_colours(self, target: Path, colour: tuple[int, int, int]) -> None:
        write(target, np.broadcast_to(np.array(colour, dtype=np.uint8), (4, 32, 32, 3)))
        assert np.abs(read_video(target)[0].astype(int) - colour).max() <= 3
        with av.open(str(target)) as container:
            context = container.streams.video[0].codec_context
            assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (
                1,
                1,
                1,
                1,
            )

    @pytest.mark.parametrize("chunk", [1, 9, 12])
    def test_streamed_file_equals_one_shot_file(self, tmp_path: Path, chunk: int) -> None:
        frames = make_frames(33)
        write(tmp_path / "once.mp4", frames)
        write(tmp_path / "stream.mp4", frames, chunk=chunk)
        assert np.array_equal(read_video(tmp_path / "once.mp4")[0], read_video(tmp_path / "stream.mp4")[0])

    @pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="fills fresh memory through glibc's mallopt")
    @pytest.mark.parametrize(("height", "width"), [(32, 48), (240, 416), (472, 840)])
    def test_file_does_not_depend_on_stale_memory(self, tmp_path: Path, height: int, width: int) -> None:
        """x264's macroblock tree made the file depend on what freed memory had held, on AVX-512 machines."""
        frames, files = make_frames(25, height, width), []
        mallopt, perturb = ctypes.CDLL(None).mallopt, -6
        try:
            for fill in (0x55, 0xAA, 0x01):
                mallopt(perturb, fill)
                write(tmp_path / "video.mp4", frames)
                files.append((tmp_path / "video.mp4").read_bytes())
        finally:
            mallopt(perturb, 0)
        assert files[0] == files[1] == files[2]

    @pytest.mark.parametrize(
        "convert",
        [
            lambda frames: torch.from_numpy(frames),
            lambda frames: frames.astype(np.float32) / 255,
            lambda frames: torch.from_numpy(frames).float().div(255).requires_grad_(),
            lambda frames: torch.from_numpy(frames).double().div(255),
            lambda frames: torch.from_numpy(frames.transpose(3, 0, 1, 2).copy()).permute(1, 2, 3, 0),
            lambda frames: frames[::-1].copy()[::-1],
        ],
        ids=["torch uint8", "float32", "torch float with grad", "torch float64", "strided", "reversed"],
    )
    def test_accepted_arrays_give_the_same_file(self, tmp_path: Path, convert: Callable) -> None:
        frames = make_frames()
        write(tmp_path / "a.mp4", frames)
        write(tmp_path / "b.mp4", convert(frames))
        assert np.array_equal(read_video(tmp_path / "a.mp4")[0], read_video(tmp_path / "b.mp4")[0])

    def test_writer_can_be_used_again(self, target: Path) -> None:
        writer = VideoWriter(target, 16)
        for count, width in ((5, 32), (7, 64)):
            with writer:
                writer.write(make_frames(count, width=width))
                assert writer.num_frames == count
            assert read_video(target)[0].shape == (count, 32, width, 3)


class TestAtomicity:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    @pytest.mark.parametrize("count", [0, 1, 100], ids=["nothing written", "inside the encoder", "on the disk"])
    def test_error_in_the_block_leaves_no_file(self, target: Path, error: type[BaseException], count: int) -> None:
        with pytest.raises(error, match="stop"), VideoWriter(target, 16) as writer:
            if count:
                writer.write(make_frames(count))
            raise error("stop")
        assert list(target.parent.iterdir()) == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_error_keeps_the_file_that_was_there(self, target: Path, error: type[BaseException]) -> None:
        write(target, make_frames(5))
        before = target.read_bytes()
        with pytest.raises(error), VideoWriter(target, 16) as writer:
            writer.write(make_frames(40))
            raise error
        assert target.read_bytes() == before and list(target.parent.iterdir()) == [target]

    def test_name_appears_at_the_end_only(self, target: Path) -> None:
        with VideoWriter(target, 16) as writer:
            writer.write(make_frames(100))
            assert not target.exists()
            (part,) = target.parent.iterdir()
            assert part.name.startswith(".video.mp4.part-")
        assert list(target.parent.iterdir()) == [target]

    def test_two_writers_of_one_name(self, target: Path) -> None:
        with VideoWriter(target, 16) as first, VideoWriter(target, 16) as second:
            first.write(make_frames(100))
            second.write(make_frames(120))
        assert len(read_video(target)[0]) == 100, "the last to finish stays"
        assert list(target.parent.iterdir()) == [target]

    def test_failing_rename_removes_the_part(self, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> None:
            raise PermissionError("no")

        monkeypatch.setattr("diffusers_ardiff.video_io.os.replace", fail)
        with pytest.raises(PermissionError):
            write(target, make_frames())
        assert list(target.parent.iterdir()) == []

    def test_zero_frames(self, target: Path) -> None:
        with pytest.raises(ValueError, match=r"No frames .*video\.mp4"), VideoWriter(target, 16):
            pass
        assert list(target.parent.iterdir()) == []


class TestRefusals:
    @pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1e-9, 1e6])
    def test_fps(self, target: Path, fps: float) -> None:
        with pytest.raises(ValueError, match="fps must be"):
            VideoWriter(target, fps)

    @pytest.mark.parametrize("crf", [-1, 52, 18.5])
    def test_crf(self, target: Path, crf: int) -> None:
        with pytest.raises(ValueError, match="crf must be"):
            VideoWriter(target, 16, crf=crf)

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="absent does not exist"):
            VideoWriter(tmp_path / "absent" / "video.mp4", 16)
        with pytest.raises(FileNotFoundError, match="absent does not exist"):
            save_contact_sheet(make_frames(), tmp_path / "absent" / "image.png")

    def test_names(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"end in \.mp4, \.webm, \.gif"):
            VideoWriter(tmp_path / "video.avi", 16)
        (tmp_path / "folder.mp4").mkdir()
        with pytest.raises(IsADirectoryError, match=r"folder\.mp4 is a folder"):
            VideoWriter(tmp_path / "folder.mp4", 16)

    @pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47)])
    def test_odd_size(self, target: Path, height: int, width: int) -> None:
        with VideoWriter(target, 16) as writer:
            with pytest.raises(ValueError, match=f"even height and width, got {height} x {width}"):
                writer.write(make_frames(height=height, width=width))
            assert list(target.parent.iterdir()) == []
            writer.write(make_frames())

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            (np.zeros((32, 48, 3), np.uint8), r"got \(32, 48, 3\)"),
            (torch.zeros(2, 3, 32, 48), r"got \(2, 3, 32, 48\)"),
            (np.zeros((0, 32, 48, 3), np.uint8), r"got \(0, 32, 48, 3\)"),
            ([1, 2], "got list"),
            (np.zeros((2, 32, 48, 3), np.int64), "got int64"),
            (torch.zeros(2, 32, 48, 3, dtype=torch.bool), "got bool"),
            (np.full((2, 32, 48, 3), -1.0), r"in \[0, 1\], got -1 .. -1"),
            (np.full((2, 32, 48, 3), 255.0), "got 255 .. 255"),
            (np.full((2, 32, 48, 3), np.nan), "got nan"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_frames(self, target: Path, frames: object, message: str) -> None:
        with VideoWriter(target, 16) as writer:
            with pytest.raises(ValueError, match=message):
                writer.write(frames)
            writer.write(make_frames())
            with pytest.raises(ValueError, match=r"is 32 x 48 .* got 32 x 64"):
                writer.write(make_frames(width=64))
        assert len(read_video(target)[0]) == 9, "a refused chunk leaves no frame behind"

    def test_write_outside_of_the_block(self, target: Path) -> None:
        writer = VideoWriter(target, 16)
        with pytest.raises(RuntimeError, match="with VideoWriter"):
            writer.write(make_frames())
        with writer:
            writer.write(make_frames())
            with pytest.raises(RuntimeError, match="already open"):
                writer.__enter__()
        with pytest.raises(RuntimeError, match="with VideoWriter"):
            writer.write(make_frames())


class TestReaders:
    def test_max_frames(self, target: Path) -> None:
        write(target, make_frames(30))
        whole, fps = read_video(target)
        some, some_fps = read_video(target, max_frames=7)
        assert np.array_equal(some, whole[:7]) and fps == some_fps == 16
        assert len(read_video(target, max_frames=99)[0]) == 30
        with pytest.raises(ValueError, match="max_frames"):
            read_video(target, max_frames=0)

    @pytest.mark.parametrize("read", [read_video, read_image])
    def test_missing_and_broken_files(self, tmp_path: Path, read: Callable) -> None:
        with pytest.raises(FileNotFoundError, match="absent"):
            read(tmp_path / "absent")
        for content in (b"", b"not a picture" * 100):
            (tmp_path / "broken").write_bytes(content)
            with pytest.raises(ValueError, match="broken is not a readable"):
                read(tmp_path / "broken")

    def test_truncated_image(self, tmp_path: Path) -> None:
        save_png_atomic(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), tmp_path / "a.png")
        (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])
        with pytest.raises(ValueError, match=r"b\.png is not a readable image"):
            read_image(tmp_path / "b.png")

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
    def test_images_become_rgb(self, tmp_path: Path, mode: str) -> None:
        Image.new("RGB", (6, 4), (102, 102, 102)).convert(mode).save(tmp_path / "image.png")
        image = read_image(tmp_path / "image.png")
        assert image.dtype == np.uint8 and np.array_equal(image, np.full((4, 6, 3), 102))

    def test_image_is_turned_upright(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (6, 4)).save(tmp_path / "photo.jpg", exif=exif)
        assert read_image(tmp_path / "photo.jpg").shape == (6, 4, 3)


class TestPictures:
    def test_png_is_exact(self, tmp_path: Path) -> None:
        image = make_frames()[0]
        save_png_atomic(image, tmp_path / "image.png")
        assert np.array_equal(read_image(tmp_path / "image.png"), image)

    def test_failed_png_keeps_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "image.png"
        save_png_atomic(make_frames()[0], path)
        before = path.read_bytes()

        def fail(self: Image.Image, part: Path, **kwargs: object) -> None:
            part.write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(Image.Image, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            save_png_atomic(make_frames()[1], path)
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
    def test_png_refuses(self, tmp_path: Path, image: np.ndarray) -> None:
        with pytest.raises(ValueError, match="image must be uint8"):
            save_png_atomic(image, tmp_path / "image.png")

    @pytest.mark.parametrize(
        ("count", "options", "size"),
        [
            (81, {}, (3 * 32, 9 * 48)),
            (5, {}, (32, 5 * 48)),
            (81, {"columns": 4, "max_frames": 10, "scale": 0.5}, (3 * 16, 4 * 24)),
            (81, {"columns": 80, "max_frames": 81}, (2 * 16, 80 * 24)),
        ],
    )
    def test_sheet_size(self, tmp_path: Path, count: int, options: dict, size: tuple[int, int]) -> None:
        save_contact_sheet(make_frames(count), tmp_path / "sheet.png", **options)
        assert read_image(tmp_path / "sheet.png").shape == (*size, 3)

    def test_sheet_shows_first_to_last(self, tmp_path: Path) -> None:
        """Every frame is one grey level; the lower right pixel of a cell is free of the label."""
        frames = np.repeat(np.arange(81, dtype=np.uint8), 32 * 48 * 3).reshape(81, 32, 48, 3)
        save_contact_sheet(frames, tmp_path / "sheet.png", columns=3, max_frames=9)
        sheet = read_image(tmp_path / "sheet.png")
        assert (sheet[31::32, 47::48, 0].ravel()).tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80]
        cells = sheet.reshape(3, 32, 3, 48, 3).swapaxes(1, 2).reshape(9, 32, 48, 3)
        assert (cells[:, :16].max(axis=(1, 2, 3)) > 180).all(), "every frame has a bright label"

    @pytest.mark.parametrize("options", [{"columns": 0}, {"max_frames": 0}, {"scale": 0}, {"scale": float("nan")}])
    def test_sheet_refuses(self, tmp_path: Path, options: dict) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            save_contact_sheet(make_frames(), tmp_path / "sheet.png", **options)
        with pytest.raises(ValueError, match="frames must be uint8"):
            save_contact_sheet(make_frames()[0], tmp_path / "sheet.png")
        assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, signal, sys
import numpy as np
from diffusers_ardiff.video_io import VideoWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
frames = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)
try:
    with VideoWriter(sys.argv[1], fps=16) as writer:
        writer.write(frames)
except OSError as error:
    print("refused", error.errno)
"""


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
def test_disk_that_takes_no_more(tmp_path: Path, suffix: str) -> None:
    """The system refuses to write beyond 8 kB: an error, the old file, and no part of the new one."""
    path = tmp_path / f"clip{suffix}"
    path.write_bytes(b"precious")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"refused {errno.EFBIG}\n"
    assert path.read_bytes() == b"precious"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
