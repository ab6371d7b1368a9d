"""Trace the cells of SimpleTuner's table that diffusers' loop runs, and keep their peaks and verdicts.

`python -m published.traced.simpletuner CSV [TEXT]` traces those whose key holds the text and that simpletuner.json has
not yet, into which it writes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from published.simpletuner import DATA, cells, known


def main(path: Path, text: str = "") -> None:
    """Trace the cells one by one."""
    made = known()
    for cell in cells(path):
        if text not in cell.key or cell.traced in made:
            continue
        ran = subprocess.run([sys.executable, "-m", "memfit", *cell.command], capture_output=True, text=True)
        if not ran.stdout:
            print(f"{cell.key}: {ran.stderr.strip()}", file=sys.stderr)
            continue
        found = json.loads(ran.stdout)
        levels = [phase["levels"] for phase in found["phases"]]
        most, held = (max(each[level] for each in levels) for level in ("allocated", "reserved"))
        made[cell.traced] = most, held, found["verdict"]
        print(f"{cell.traced}: {most / 2**30:.2f} GiB, {found['verdict']}; {cell.measured or 'OOM'}", flush=True)
        DATA.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
