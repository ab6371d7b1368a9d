"""Draft."""

import sys
from collections import defaultdict
from pathlib import Path

from published.case import NotCovered
from published.frameworks import case_of
from published.predict import predict
from published.rows import read_rows


def main():
    path = (
        Path(sys.argv[1])
        if len(sys.argv) > 1 and sys.argv[1] != "-"
        else Path(__file__).parents[2] / ".." / "shared" / "data" / "measured_runs.csv"
    )
    pick = sys.argv[2] if len(sys.argv) > 2 else ""
    out = defaultdict(list)
    why = defaultdict(int)
    for row in read_rows(path):
        if pick and pick not in row.id:
            continue
        try:
            case = case_of(row)
        except NotCovered as e:
            why[row.group, str(e)] += 1
            continue
        got = predict(case)
        err = got / row.measured - 1
        out[row.group].append((err, row, got))
        r = case.recipe
        print(
            f"{row.id:18}{row.quality} {row.model[:28]:28} {r.method:5} {r.quantization:10} b{r.micro_batch} s{r.sequence_length:<5} {r.checkpointing:6} {case.compared:9} {got / 2**30:7.2f} {row.measured / 2**30:7.2f} {err * 100:+6.1f}%"
        )
    for g, v in out.items():
        for q in ("A", "B", "C"):
            e = [x[0] for x in v if x[1].quality == q]
            if e:
                print(
                    f"{g:16}{q} n={len(e):3} mean|e|={sum(map(abs, e)) / len(e) * 100:5.1f}% worst under {min(e) * 100:+.1f}% over {max(e) * 100:+.1f}%  under {sum(x < 0 for x in e) / len(e):.0%}"
                )
    for (g, w), n in why.items():
        print(f"   not covered {g} {n}: {w}") if pick else None
