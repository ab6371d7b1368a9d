"""Trace the cells of SimpleTuner's table that diffusers' loop runs, and keep their peaks and verdicts.

`python -m published.traced.simpletuner CSV [TEXT]` traces those whose key holds the text and writes simpletuner.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from published.simpletuner import DATA, cells, known


def main(path: Path, text: str = "") -> None:
    """Trace the cells one by one; what is known already stays."""
    made = known()
    for cell in cells(path):
        if text not in cell.key:
            continue
        ran = subprocess.run([sys.executable, "-m", "memfit", *cell.command], capture_output=True, text=True)
        if not ran.stdout:
            print(f"{cell.key}: {ran.stderr.strip()}", file=sys.stderr)
            continue
        found = json.loads(ran.stdout)
        made[cell.key] = found["peak"]["reserved"], found["verdict"]
        print(f"{cell.key}: {found['peak']['reserved'] / 2**30:.2f} GiB, {found['verdict']}; {cell.measured or 'OOM'}")
        DATA.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
