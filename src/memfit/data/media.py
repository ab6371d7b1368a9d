"""Sizes of images and lengths of recordings, read from their headers; nothing is decoded and nothing is fetched."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from memfit.data.samples import UnusableError
from memfit.extras import MissingExtra

ELSEWHERE = ("http://", "https://", "s3://", "gs://", "hf://")
UNKNOWN = (0, 0)


def pixels(value: Any, folder: Path | None) -> tuple[int, int]:
    """Return the width and height of an image: a path or {"path" or "bytes"}; (0, 0) for one that lies elsewhere.

    Raises UnusableError for what is no image.
    """
    source = _source(value, folder, "image")
    if source is None:
        return UNKNOWN
    try:
        import imagesize
    except ImportError:
        raise MissingExtra("reading the sizes of images", "data") from None
    wide, tall = imagesize.get(source)
    if wide < 1 or tall < 1:
        raise UnusableError("a file that is no image of a known format")
    return wide, tall


def seconds(value: Any, folder: Path | None) -> float:
    """Return the length of a recording: a path, {"path" or "bytes"}, or {"array", "sampling_rate"}; 0: elsewhere.

    Raises UnusableError for what is no recording.
    """
    if isinstance(value, dict) and isinstance(value.get("array"), list):
        rate = value.get("sampling_rate")
        if not isinstance(rate, int) or rate < 1:
            raise UnusableError("an array of sound without its sampling_rate")
        return len(value["array"]) / rate
    source = _source(value, folder, "recording")
    if source is None:
        return 0.0
    try:
        from tinytag import TinyTag
    except ImportError:
        raise MissingExtra("reading the lengths of recordings", "data") from None
    try:
        if isinstance(source, Path):
            found = TinyTag.get(source, tags=False)
        else:
            found = TinyTag.get(file_obj=source, tags=False)
    except Exception as error:  # of a damaged file the library raises what its parser meets
        raise UnusableError(f"a file that is no recording of a known format ({type(error).__name__})") from None
    if not found.duration or found.duration < 0:
        raise UnusableError("a recording that does not say how long it is")
    return found.duration


def _source(value: Any, folder: Path | None, what: str) -> Path | io.BytesIO | None:
    """Return the file or the bytes of an image or a recording; None where it lies elsewhere, or in no known folder."""
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return io.BytesIO(value["bytes"])
        value = value.get("path")
    if not isinstance(value, str):
        raise UnusableError(f"the {what} is neither a path nor bytes")
    if folder is None or value.startswith(ELSEWHERE):
        return None
    try:
        path = next((path for path in (folder / value, Path(value)) if path.is_file()), None)
    except OSError:  # too long for a path: an image as text
        path = None
    if path is None:
        raise UnusableError(f"there is no {what} {value[:60]}")
    return path
