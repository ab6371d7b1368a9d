"""How fast the page answers: `python benchmarks/page.py` starts it, asks, and prints milliseconds.

Three figures: the page itself, one asker who moves a slider (a question at a time, none asked before), and 100 askers
at once, each with a question of their own and all with the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import Request, urlopen

from screenshots import served

ASKERS = 100
RECIPE = {"model": "llama-3.1-8b", "gpu": "rtx-4090", "method": "lora", "checkpointing": "full", "loss": "fused"}


def told(name: str, seconds: Sequence[float]) -> None:
    """Print the median, the slowest of a hundred and the slowest."""
    ordered = sorted(seconds)
    at = [ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000 for share in (0.5, 0.99, 1)]
    print(f"{name}: median {at[0]:,.0f} ms, 99 of 100 under {at[1]:,.0f} ms, slowest {at[2]:,.0f} ms")


def main() -> None:
    """Start the page, and measure."""
    with served() as printed:
        address = urlsplit(printed)
        token = parse_qs(address.query)["token"][0]

        def timed(path: str) -> float:
            begun = time.perf_counter()
            asked = Request(f"http://{address.netloc}{path}", headers={"X-Memfit-Token": token})
            with urlopen(asked, timeout=300) as answer:
                assert b'"error"' not in answer.read()[:20]
            return time.perf_counter() - begun

        def ask(kind: str, **words: object) -> Callable[[], float]:
            path = f"/ask/{kind}?{urlencode({**RECIPE, **words})}"
            return lambda: timed(path)

        told("the page", [timed("/")])
        told("first answer", [ask("plan")()])
        moves = list(product((1, 2, 4, 8, 16), range(600, 4000, 400)))
        told("a slider", [ask("estimate", **{"micro-batch": b, "sequence-length": n})() for b, n in moves])
        with ThreadPoolExecutor(ASKERS) as many:
            own = [ask("estimate", **{"sequence-length": 1024 + 8 * i}) for i in range(ASKERS)]
            told("100 askers at once, each of their own", list(many.map(lambda f: f(), own)))
            same = [ask("plan", **{"sequence-length": 3000})] * ASKERS
            told("100 askers at once, all the same plan", list(many.map(lambda f: f(), same)))


if __name__ == "__main__":
    main()
