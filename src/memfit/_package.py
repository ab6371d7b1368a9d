"""What the package knows of itself: its version, and the folder its own files lie in."""

from pathlib import Path

__version__ = "0.1.0"
FOLDER = Path(__file__).parent  # a frame or module below it is memfit's own, not the user's
