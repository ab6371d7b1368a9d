"""The package's version, and its folder, which separates its own files from the user's."""

import os

__version__ = "0.1.0"
# A frame or module whose file begins with this is memfit's. Importing pathlib would slow `import memfit` by a fifth.
FOLDER = os.path.dirname(__file__) + os.sep  # noqa: PTH120
