"""Fit what `memfit explain` takes from a report's words to reports whose cause is known: `python benchmarks/learn_causes.py [--write]`.

Reads tests/data/oom_cases.csv and oom_cases_later.csv as a user would have written them (see oom_cases.py); oom_cases_written.csv,
whose reports nobody made (a language model wrote them: some from scratch, field by field, repository by repository, and in sets that tell
nearly the same with other causes; some as others would have told what a real report tells); and the phrases of oom_phrases.csv.
Fits a multinomial logistic regression (scikit-learn, which it alone needs) on tf-idf of pieces of words and of words and pairs of
them, and on the signs of explain/text.py. Signs were written with the reports of the first collection and of lots a to j at hand, so
these are fitted without their signs, which would be trusted too much.
Prints how often the cause is named of reports it was not fitted to, nor to what was written after them: tenfold cross-validation, by
lot; in the first collection and lots a to j signs know the reports, and only the words do not. "enough": a reader who saw only the
report thought that it tells its cause (oom_cases_read.csv).
--without LOTS: the same of these lots and of lot z, by a fit to the others. --write: only fit, and put the table into src/memfit/catalogue/words_of_causes.gz.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memfit.catalogue.weights import Weights
from memfit.explain import explain, learned, read_text
from memfit.explain.clue import Clue
from memfit.explain.evidence import Evidence
from memfit.explain.text.findings import clues
from oom_cases import CLASSES, DATA, DEFAULT, enough, text_of

TABLE = Path(__file__).resolve().parents[1] / "src" / "memfit" / "catalogue" / "words_of_causes.gz"
HELD_OUT = DATA / "oom_cases_held_out.csv"
WRITTEN, PHRASES = DATA / "oom_cases_written.csv", DATA / "oom_phrases.csv"
RARE = {
    "pieces": 12,
    "words": 3,
}  # reports that have a feature which is used; 10 and 2 name as many, 25 and 4 up to two of a hundred less
STRENGTH = 20.0  # inverse of the regularisation; 6 to 20 do alike
WEIGHT = 0.7  # of a written report beside a real one; 0.4 to 1 do alike
KNOWN_TO_SIGNS = frozenset(["first", *"abcdefghij"])
FOLDS = 10


@dataclass(frozen=True)
class Report:
    """One report: its id, its lot, whether it tells its cause, what it says, its causes."""

    id: str
    lot: str
    enough: bool
    evidence: Evidence
    causes: tuple[str, ...]

    @property
    def clues(self) -> list[Clue]:
        """The signs in it, unless they were written with it."""
        return [] if self.lot in KNOWN_TO_SIGNS else clues(self.evidence)


def reports(paths: tuple[Path, ...] = DEFAULT) -> list[Report]:
    """All of them. Ids of later lots begin with their number in thousands or their letter."""
    found, told = [], enough()
    for path in paths:
        for row in csv.DictReader(path.open(newline="", encoding="utf-8")):
            causes = tuple(CLASSES.get(part.strip(), part.strip()) for part in row["cause_class"].split("+"))
            later = path != DEFAULT[0]
            lot = (row["id"][0] if row["id"][0].isalpha() else "abcd"[int(row["id"]) // 1000 - 1]) if later else "first"
            found.append(Report(row["id"], lot, row["id"] in told, read_text(text_of(row)), causes))
    return found


@cache
def written() -> list[tuple[str, Evidence, list[Clue], str]]:
    """(id of the real report that it tells again, or "", what it says, its signs, cause) of the reports that nobody made."""
    with WRITTEN.open(newline="", encoding="utf-8") as file, PHRASES.open(newline="", encoding="utf-8") as phrases:
        told = [(row["source"], text_of(row), row["cause"]) for row in csv.DictReader(file)]
        told += [("", row["text"], row["cause"]) for row in csv.DictReader(phrases)]
    read = [(source, read_text(text), cause) for source, text, cause in told]
    return [(source, evidence, clues(evidence), cause) for source, evidence, cause in read]


def digest() -> str:
    """Of the files it was fitted to."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*DEFAULT, WRITTEN, PHRASES))).hexdigest()[:16]


def fitted(told: list[Report]) -> Weights:
    """The table as `learned` reads it."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    known = {"", *(report.id for report in told)}
    rows = [(report.evidence, report.clues, cause, 1.0) for report in told for cause in report.causes]
    rows += [(evidence, signs, cause, WEIGHT) for source, evidence, signs, cause in written() if source in known]
    pieces = TfidfVectorizer(sublinear_tf=True, analyzer=learned.pieces, min_df=RARE["pieces"])
    words = TfidfVectorizer(sublinear_tf=True, analyzer=learned.words, min_df=RARE["words"])
    signs = DictVectorizer()
    texts = [evidence.text for evidence, *_ in rows]
    columns = [
        pieces.fit_transform(texts),
        words.fit_transform(texts),
        signs.fit_transform([learned.strengths(clues) for _, clues, *_ in rows]),
    ]
    model = LogisticRegression(C=STRENGTH, max_iter=3000, class_weight="balanced")
    model.fit(hstack(columns).tocsr(), [cause for *_, cause, _ in rows], sample_weight=[weight for *_, weight in rows])
    names = [*pieces.get_feature_names_out(), *words.get_feature_names_out(), *signs.get_feature_names_out()]
    rarity = [*pieces.idf_, *words.idf_, *(1.0 for _ in signs.feature_names_)]
    weights = [[round(float(w) / learned.UNIT) for w in column] for column in model.coef_.T]
    features = {
        n: (round(float(idf), 3), w) for n, idf, w in sorted(zip(names, rarity, weights, strict=True)) if any(w)
    }
    bias = [round(float(b) / learned.UNIT) for b in model.intercept_]
    return Weights.of([str(c) for c in model.classes_], bias, features, {"reports": len(told), "files": digest()})


def cross_validated(told: list[Report]) -> list[tuple[Report, bool, bool]]:
    """Of every report: did the words alone name it, did both."""
    order = list(range(len(told)))
    random.Random(0).shuffle(order)
    found = []
    for fold in range(FOLDS):
        kept = set(order[fold::FOLDS])
        table = fitted([report for n, report in enumerate(told) if n not in kept])
        found += [(told[n], *named(told[n], table)) for n in kept]
    return found


def named(report: Report, table: Weights) -> tuple[bool, bool]:
    """With this table: did the words alone name it, did all of explain."""
    learned._model = lambda: table  # type: ignore[assignment]
    chances = learned.probabilities(report.evidence, ())
    alone = max(chances, key=chances.__getitem__, default="") in report.causes
    return alone, explain(report.evidence)[0].cause in report.causes


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
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--write", action="store_true")
    way.add_argument("--without", metavar="LOTS", help="fit to all but these (klmnopqrstuvwxy), score these and lot z")
    asked, told = parser.parse_args(), reports()
    if asked.write:
        TABLE.write_bytes(fitted(told).dumps())
        return
    print(
        "| lot | reports | words alone | signs and words | enough | signs and words |\n|---|---:|---:|---:|---:|---:|"
    )
    if asked.without:
        table = fitted([report for report in told if report.lot not in asked.without])
        kept = [report for report in told if report.lot in asked.without] + reports((HELD_OUT,))
        found = [(report, *named(report, table)) for report in kept]
    else:
        found = cross_validated(told)
    for lot in sorted({report.lot for report, *_ in found}):
        print(line(lot, [row for row in found if row[0].lot == lot]))
    if together := [row for row in found if row[0].lot in "klmno"]:
        print(line("k to o", together))
    print(line("all", found))


if __name__ == "__main__":
    main()
