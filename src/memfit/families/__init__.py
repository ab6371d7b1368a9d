"""Model families: `architecture(config, name)` turns the text of a config.json into an Architecture."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.architecture import Architecture
from memfit.errors import Unsupported
from memfit.families.decoder import decoder
from memfit.families.encoders import ENCODERS
from memfit.families.fields import TRACE_HINT
from memfit.families.classic import CLASSICS
from memfit.families.gemma import GEMMAS
from memfit.families.hybrid import HYBRIDS
from memfit.families.latent import LATENTS
from memfit.families.rows import DECODERS

DIALECTS = {**DECODERS, **CLASSICS, **LATENTS, **HYBRIDS, **GEMMAS, **ENCODERS}


def architecture(config: Mapping[str, object], name: str) -> Architecture:
    """A config.json, parsed, as an Architecture. Raises Unsupported for an unknown family, BadInput for bad values."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in DIALECTS:
        raise Unsupported(f"{name}: the model family '{model_type}' is not modelled", hint=TRACE_HINT)
    return decoder(config, name, DIALECTS[model_type])
