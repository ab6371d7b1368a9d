"""Fit the words of `memfit explain` to reports whose cause is known: `python benchmarks/learn_causes.py [--write]`.

Reads tests/data/oom_cases.csv and oom_cases_later.csv as a user would have written them (see oom_cases.py) and fits a multinomial logistic
regression on tf-idf of single words (scikit-learn, which it alone needs). Prints how often the words alone, and with the
signs, name the cause of reports they were not fitted to: tenfold cross-validation, by lot. Signs were written with the
reports of the first collection and of lots a to j, so only the later lots tell what the two get together.
--write: put the table into src/memfit/catalogue/words_of_causes.json, weights as integers of a tenth.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.explain import explain, learned, read_text
from memfit.explain.evidence import Evidence
from oom_cases import CLASSES, DEFAULT, text_of

TABLE = Path(__file__).resolve().parents[1] / "src" / "memfit" / "catalogue" / "words_of_causes.json"
RARE = 3  # reports that have a word which is used
STRENGTH = 10.0  # inverse of the regularisation; 3 to 30 do alike
FOLDS = 10


@dataclass(frozen=True)
class Report:
    """One report: its lot, what it says, its causes."""

    lot: str
    evidence: Evidence
    causes: tuple[str, ...]


def reports() -> list[Report]:
    """All of them. Ids of later lots begin with their number in thousands or their letter."""
    found = []
    for path in DEFAULT:
        for row in csv.DictReader(path.open(newline="", encoding="utf-8")):
            causes = tuple(CLASSES[part.strip()] for part in row["cause_class"].split("+"))
            later = path != DEFAULT[0]
            lot = (row["id"][0] if row["id"][0].isalpha() else "abcd"[int(row["id"]) // 1000 - 1]) if later else "first"
            found.append(Report(lot, read_text(text_of(row)), causes))
    return found


def digest() -> str:
    """Of the files it was fitted to."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in DEFAULT)).hexdigest()[:16]


def fitted(told: list[Report]) -> dict[str, Any]:
    """The table as `learned` reads it."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(
        sublinear_tf=True, token_pattern=learned.WORD.pattern, min_df=RARE, stop_words=[*learned.FORM]
    )
    pairs = [(report.evidence.text, cause) for report in told for cause in report.causes]
    vectors.fit([report.evidence.text for report in told])
    rows = vectors.transform([text for text, _ in pairs])
    model = LogisticRegression(C=STRENGTH, max_iter=3000, class_weight="balanced").fit(rows, [c for _, c in pairs])
    weights = {
        word: [round(float(vectors.idf_[n]), 3), *(round(w / learned.UNIT) for w in model.coef_[:, n])]
        for word, n in sorted(vectors.vocabulary_.items())
    }
    return {
        "fitted_to": {"reports": len(told), "files": digest()},
        "causes": [str(cause) for cause in model.classes_],
        "bias": [round(b / learned.UNIT) for b in model.intercept_],
        "words": weights,
    }


def cross_validated(told: list[Report]) -> dict[str, tuple[int, int, int]]:
    """lot -> reports, named by the words alone, named by both."""
    order = list(range(len(told)))
    random.Random(0).shuffle(order)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for fold in range(FOLDS):
        kept = set(order[fold::FOLDS])
        table = fitted([report for n, report in enumerate(told) if n not in kept])
        learned._model = lambda table=table: table  # type: ignore[assignment]
        for n in kept:
            report = told[n]
            chances = learned.probabilities(report.evidence)
            row = found[report.lot]
            row[0] += 1
            row[1] += max(chances, key=chances.__getitem__, default="") in report.causes
            row[2] += explain(report.evidence)[0].cause in report.causes
    return {lot: (row[0], row[1], row[2]) for lot, row in sorted(found.items())}


def main() -> None:
    """Fit, tell, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked, told = parser.parse_args(), reports()
    if asked.write:
        table = fitted(told)
        words = ",\n".join(f"{json.dumps(word)}: {json.dumps(row)}" for word, row in table.pop("words").items())
        TABLE.write_text(json.dumps(table)[:-1] + ', "words": {\n' + words + "\n}}\n", encoding="utf-8")
    print("| lot | reports | words alone | signs and words |\n|---|---:|---:|---:|")
    for lot, (count, alone, both) in cross_validated(told).items():
        print(f"| {lot} | {count} | {alone / count:.1%} | {both / count:.1%} |")


if __name__ == "__main__":
    main()
