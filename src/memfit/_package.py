"""The package's version, and its folder, which separates its own files from the user's."""

import os

__version__ = "0.1.0"
# A frame or module whose file begins with this is memfit's own, not the user's. pathlib would cost a fifth of the import.
FOLDER = os.path.dirname(__file__) + os.sep  # noqa: PTH120
