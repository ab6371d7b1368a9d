"""Makes the embedded model and its data in a folder: `python -m memfit.run.embedded FOLDER`, because PyTorch imports slowly."""

from __future__ import annotations

import sys
from pathlib import Path

from memfit.run.embedded import write

if __name__ == "__main__":
    write(Path(sys.argv[1]))
