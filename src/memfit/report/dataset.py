"""The screen of `memfit data`: lengths of samples, sequence lengths to choose from, and what padding would waste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memfit.data.lengths import PERCENTILES, Lengths, choose_sequence_length, packed, padding_waste, samples_of
from memfit.report.layout import Column, Grid, paragraphs, table, text
from memfit.report.words import DOT, cut_words, tokens
from memfit.units import several

BAR = 30  # columns of the longest bar


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """The facts about a training file that the view shows."""

    path: str
    lengths: Lengths
    layouts: Sequence[tuple[str, int]]
    tokenizer: str
    longest: Sequence[tuple[int, int]]  # (tokens, line)
    broken: Sequence[tuple[int, str]]  # (line, reason) of the first few
    broken_count: int
    complete: bool
    notes: Sequence[str]
    beside: Sequence[str] = ()  # what a task's samples have beside their tokens


def dataset_view(data: DatasetFacts, micro_batch: int) -> Group:
    """Show the summary, the histogram, sequence lengths to choose from, and problems."""
    found = data.lengths
    about = [
        several(found.count, "sample"),
        several(found.tokens, "token"),
        f"mean {found.tokens / found.count:,.0f}",
    ]
    about += [f"{'max' if p == 100 else f'p{p}'} {tokens(found.percentile(p))}" for p in PERCENTILES]
    cut = choose_sequence_length(found)
    parts: list[RenderableType] = [text(data.path, "bold")]
    if found.longest:
        parts += [
            text(f"--sequence-length {cut.length}: {cut_words(samples_of(found, cut.length))}"),
            text(DOT.join(about)),
            "",
            Histogram(found),
            "",
            _choices(found, micro_batch),
        ]
    else:  # the size of a sample is no number of tokens
        parts.append(text(about[0]))
    parts.append("")
    facts = [("tokenizer:", data.tokenizer), ("layout:", DOT.join(f"{name} ({tokens(n)})" for name, n in data.layouts))]
    if data.beside:
        facts.append(("beside:", DOT.join(data.beside)))
    facts = facts if found.longest else facts[1:]
    if found.longest:
        facts.append(("longest:", DOT.join(f"{several(n, 'token')} on line {line}" for n, line in data.longest)))
    if not data.complete:
        facts.append(("not known:", "reading stopped at --limit: the rest of the file may hold longer samples"))
    if data.broken_count:
        facts.append(
            ("broken:", f"{tokens(data.broken_count)} record{'s' if data.broken_count > 1 else ''} could not be used")
        )
        facts += [("", f"line {line}: {reason}") for line, reason in data.broken]
    facts += [("note:", note) for note in data.notes]
    return Group(*parts, paragraphs(facts))


class Histogram:
    """Samples by length, one row per bin; the bars are left out where there is no terminal."""

    def __init__(self, lengths: Lengths) -> None:
        self.rows = lengths.histogram(12)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max(n for _, _, n in self.rows)
        made = table("tokens", ">samples", "")
        for low, high, n in self.rows:
            columns = -(-n * BAR // most)
            bar = Text(("#" if options.ascii_only else "█") * columns, "gold3") if options.is_terminal else ""
            made.add_row(f"{tokens(low)} to {tokens(high)}", tokens(n), bar)
        yield made


def _choices(lengths: Lengths, micro_batch: int) -> RenderableType:
    """Show what each sequence length would cut and pad, and the sequences after packing."""
    columns = (
        Column("sequence\nlength"), Column("samples\ncut", right=True), Column("tokens\nlost", right=True),
        Column(f"padding at\nmicro-batch {micro_batch}", right=True), Column("packed\nsequences", right=True, spare=1),
    )  # fmt: skip
    cuts = {c.length: c for c in (choose_sequence_length(lengths, p) for p in (90, 95, 99, 100))}
    rows = []
    for cut in cuts.values():
        waste = padding_waste(lengths, micro_batch, cut.length)
        shares = (f"{cut.truncated:.1%}", f"{cut.lost:.1%}", f"{waste.share:.0%}")
        rows.append((tokens(cut.length), *shares, tokens(packed(lengths, cut.length))))
    return Grid(columns, rows)
