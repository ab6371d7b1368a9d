"""`python -m memfit.train.embedded FOLDER` writes the model and its data; it runs apart because it imports PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.train.embedded import write

if __name__ == "__main__":
    write(Path(sys.argv[1]))
