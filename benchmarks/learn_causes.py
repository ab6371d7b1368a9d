"""Fit the words of `memfit explain` to reports whose cause is known: `python benchmarks/learn_causes.py [--write]`.

Reads tests/data/oom_cases.csv and oom_cases_later.csv as a user would have written them (see oom_cases.py), and oom_cases_written.csv,
whose reports nobody made: a language model wrote six a cause in each of seven fields, and two more of most real reports, as
others would have told the same; and the phrases of oom_phrases.csv. Fits a multinomial logistic regression on tf-idf of pieces of words (scikit-learn, which it
alone needs). Prints how often the words alone, and with the signs, name the cause of reports they were not fitted to, nor to what
was written after them: tenfold cross-validation, by lot. Signs were written with the reports of the first collection and of
lots a to j, so only the later lots tell what the two get together. "enough": a reader who saw only the report thought that it
tells its cause (oom_cases_read.csv).
--write: put the table into src/memfit/catalogue/words_of_causes.json, weights as integers of a tenth.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memfit.explain import explain, learned, read_text
from memfit.explain.evidence import Evidence
from oom_cases import CLASSES, DATA, DEFAULT, enough, text_of

TABLE = Path(__file__).resolve().parents[1] / "src" / "memfit" / "catalogue" / "words_of_causes.json"
WRITTEN, PHRASES = DATA / "oom_cases_written.csv", DATA / "oom_phrases.csv"
RARE = 25  # reports that have a piece which is used; 6 name 1 of a hundred more in three times the pieces
STRENGTH = 20.0  # inverse of the regularisation; 10 to 30 do alike
WEIGHT = 0.7  # of a written report beside a real one; a quarter to one do alike
FOLDS = 10


@dataclass(frozen=True)
class Report:
    """One report: its id, its lot, whether it tells its cause, what it says, its causes."""

    id: str
    lot: str
    enough: bool
    evidence: Evidence
    causes: tuple[str, ...]


def reports() -> list[Report]:
    """All of them. Ids of later lots begin with their number in thousands or their letter."""
    found, told = [], enough()
    for path in DEFAULT:
        for row in csv.DictReader(path.open(newline="", encoding="utf-8")):
            causes = tuple(CLASSES[part.strip()] for part in row["cause_class"].split("+"))
            later = path != DEFAULT[0]
            lot = (row["id"][0] if row["id"][0].isalpha() else "abcd"[int(row["id"]) // 1000 - 1]) if later else "first"
            found.append(Report(row["id"], lot, row["id"] in told, read_text(text_of(row)), causes))
    return found


@cache
def written() -> list[tuple[str, str, str]]:
    """(id of the real report that it tells again, or "", text, cause) of the reports that nobody made."""
    with WRITTEN.open(newline="", encoding="utf-8") as file, PHRASES.open(newline="", encoding="utf-8") as phrases:
        told = [(row["source"], text_of(row), row["cause"]) for row in csv.DictReader(file)]
        told += [("", row["text"], row["cause"]) for row in csv.DictReader(phrases)]
    return [(source, read_text(text).text, cause) for source, text, cause in told]


def digest() -> str:
    """Of the files it was fitted to."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*DEFAULT, WRITTEN, PHRASES))).hexdigest()[:16]


def fitted(told: list[Report]) -> dict[str, Any]:
    """The table as `learned` reads it."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectors = TfidfVectorizer(sublinear_tf=True, analyzer=learned.pieces, min_df=RARE)
    known = {"", *(report.id for report in told)}
    pairs = [(report.evidence.text, cause, 1.0) for report in told for cause in report.causes]
    pairs += [(text, cause, WEIGHT) for source, text, cause in written() if source in known]
    rows = vectors.fit_transform([text for text, _, _ in pairs])
    model = LogisticRegression(C=STRENGTH, max_iter=3000, class_weight="balanced")
    model.fit(rows, [cause for _, cause, _ in pairs], sample_weight=[weight for _, _, weight in pairs])
    weights = {
        word: [round(float(vectors.idf_[n]), 3), *(round(w / learned.UNIT) for w in model.coef_[:, n])]
        for word, n in sorted(vectors.vocabulary_.items())
    }
    return {
        "fitted_to": {"reports": len(told), "files": digest()},
        "causes": [str(cause) for cause in model.classes_],
        "bias": [round(b / learned.UNIT) for b in model.intercept_],
        "pieces": weights,
    }


def cross_validated(told: list[Report]) -> list[tuple[Report, bool, bool]]:
    """Of every report: did the words alone name it, did both."""
    order = list(range(len(told)))
    random.Random(0).shuffle(order)
    found = []
    for fold in range(FOLDS):
        kept = set(order[fold::FOLDS])
        table = fitted([report for n, report in enumerate(told) if n not in kept])
        learned._model = lambda table=table: table  # type: ignore[assignment]
        for report in (told[n] for n in kept):
            chances = learned.probabilities(report.evidence)
            alone = max(chances, key=chances.__getitem__, default="") in report.causes
            found.append((report, alone, explain(report.evidence)[0].cause in report.causes))
    return found


def line(lot: str, some: list[tuple[Report, bool, bool]]) -> str:
    """A row of the table."""
    enough = [both for report, _, both in some if report.enough]
    alone, both = sum(a for _, a, _ in some) / len(some), sum(b for *_, b in some) / len(some)
    return (
        f"| {lot} | {len(some)} | {alone:.1%} | {both:.1%} | {len(enough)} | {sum(enough) / max(len(enough), 1):.1%} |"
    )


def main() -> None:
    """Fit, tell, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked, told = parser.parse_args(), reports()
    if asked.write:
        table = fitted(told)
        words = ",\n".join(f"{json.dumps(word)}: {json.dumps(row)}" for word, row in table.pop("pieces").items())
        TABLE.write_text(json.dumps(table)[:-1] + ', "pieces": {\n' + words + "\n}}\n", encoding="utf-8")
    print(
        "| lot | reports | words alone | signs and words | enough | signs and words |\n|---|---:|---:|---:|---:|---:|"
    )
    found = cross_validated(told)
    for lot in sorted({report.lot for report in told}):
        print(line(lot, [row for row in found if row[0].lot == lot]))
    print(line("k to o", [row for row in found if row[0].lot in "klmno"]))


if __name__ == "__main__":
    main()
