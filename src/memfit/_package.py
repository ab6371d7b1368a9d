"""The package's version, and its folder, which separates its own files from the user's."""

from pathlib import Path

__version__ = "0.1.0"
FOLDER = Path(__file__).parent  # a frame or module whose file lies below it is memfit's own, not the user's
