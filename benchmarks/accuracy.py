"""Predict every published peak that the closed form covers and print how far off it is, source by source."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from published.main import main

if __name__ == "__main__":
    sys.exit(main())
