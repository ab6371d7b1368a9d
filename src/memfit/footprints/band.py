"""The predicted band of every phase, and alarms when a run leaves its band or fills the card."""

from __future__ import annotations

from memfit.nouns.footprint import Footprint, Levels
from memfit.nouns.plan import BAND_SHARE
from memfit.nouns.sample import METERS, Alarm, Header, Sample
from memfit.nouns.tape import Phase
from memfit.units import human

CARD_SHARE = 0.90  # of the card's bytes, all processes together: above it a slightly longer batch may not fit


def bands(predicted: Footprint | None, level: str | None) -> dict[Phase, tuple[int, int]]:
    """Return the (low, high) bytes of `level` that the prediction allows by phase; {} if they cannot be compared."""
    if predicted is None or level is None:
        return {}
    if level == "device":  # a run seen from outside has no phases
        peaks: dict[Phase, int] = {"step": max(p.levels.device for p in predicted.needed)}
    else:
        peaks = {p.phase: level_of(p.levels, level) for p in predicted.phases}
    return {phase: (peak - int(peak * BAND_SHARE), peak + int(peak * BAND_SHARE)) for phase, peak in peaks.items()}


def level_of(levels: Levels, name: str) -> int:
    """Return one of the four levels by its name."""
    return int(getattr(levels, name))


class Alarms:
    """Raises each kind of alarm once, `band` once per phase."""

    def __init__(self, header: Header) -> None:
        self.level = METERS[header.meter].compared
        self.bands = bands(header.predicted, self.level)
        self.limit = int(header.total * CARD_SHARE)
        self.total = header.total
        self._raised: set[tuple[str, Phase | None]] = set()

    def look(self, sample: Sample) -> tuple[Alarm, ...]:
        """Return the alarms that this sample raises."""
        return tuple(alarm for alarm in (self._card(sample), self._band(sample)) if alarm)

    def _card(self, sample: Sample) -> Alarm | None:
        device = sample.peak.device
        if not self.limit or device < self.limit or self._again("card", None):
            return None
        text = (
            f"{device / self.total:.0%} of the card in use: {human(device)} of {human(self.total)}, "
            f"{human(max(self.total - device, 0))} left"
        )
        return Alarm("card", sample.step, sample.phase, device, self.limit, text)

    def _band(self, sample: Sample) -> Alarm | None:
        if self.level is None or sample.phase not in self.bands:
            return None
        low, high = self.bands[sample.phase]
        measured = level_of(sample.peak, self.level)
        if measured <= high or self._again("band", sample.phase):
            return None
        text = (
            f"left the predicted band: {human(measured)} {self.level}, predicted {human(low)} to {human(high)} "
            f"({human(measured - high)} above it)"
        )
        return Alarm("band", sample.step, sample.phase, measured, high, text)

    def _again(self, kind: str, phase: Phase | None) -> bool:
        """Return whether this alarm was raised before, and remember it."""
        again = (kind, phase) in self._raised
        self._raised.add((kind, phase))
        return again
