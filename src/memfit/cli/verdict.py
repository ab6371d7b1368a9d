"""Verdicts as exit codes, so that a script can ask."""

from __future__ import annotations

from memfit.errors import EXIT_FITS, EXIT_MISFIT, EXIT_TIGHT
from memfit.plan import Verdict

EXIT_OF: dict[Verdict, int] = {"fits": EXIT_FITS, "tight": EXIT_TIGHT, "misfit": EXIT_MISFIT}
