"""Which blocks of a denoiser are recomputed in the backward pass.

diffusers checkpoints each block. SimpleTuner 4 (training/gradient_checkpointing_interval.py) groups them: some classes
run `gradient_checkpointing_interval` blocks under one checkpoint (checkpoint_sequential_state), others checkpoint one
block in so many (should_checkpoint_block). With a stride both checkpoint the first `interval` blocks of each `stride`,
and the others keep their activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from memfit.tables.pipelines import Pipeline
    from memfit.virtual.jobs.recipe import Setup


class _Segment(nn.Module):
    """Blocks that run one after the other, each on what the one before returns. fed: the inputs that it replaces."""

    def __init__(self, blocks: list[nn.Module], fed: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.fed = nn.ModuleList(blocks), fed

    def forward(self, *given: Any) -> Any:
        """Return what the last block returns."""
        inputs, found = list(given), None
        for block in self.blocks:
            found = block(*inputs)
            for place, value in zip(self.fed, (found,) if isinstance(found, Tensor) else found, strict=False):
                inputs[place] = value
        return found


def enable(denoiser: Any, setup: Setup, kind: Pipeline) -> None:
    """Checkpoint the blocks of a denoiser that the job says, in the groups that it says."""
    kept: set[nn.Module] = set()  # blocks that keep their activations
    if setup.interval > 1:
        for name in kind.segments:
            kept |= _grouped(denoiser, name, setup.interval, setup.stride or setup.interval, kind.fed)
        first = 0
        for name in kind.alternating:
            blocks = list(getattr(denoiser, name))
            size, every = (setup.interval, setup.stride) if setup.stride else (1, setup.interval)
            kept |= {block for i, block in enumerate(blocks, first) if i % every >= size}
            first += len(blocks) if kind.numbered_on else 0

    def run(block: nn.Module, *given: Any) -> Any:
        return block(*given) if block in kept else checkpoint(block, *given, use_reentrant=False)

    denoiser.enable_gradient_checkpointing(run)


def _grouped(denoiser: Any, name: str, size: int, stride: int, fed: tuple[int, ...]) -> set[nn.Module]:
    """Group the blocks of a list into segments; return those between them."""
    blocks, found, kept = list(getattr(denoiser, name)), [], set()
    for start in range(0, len(blocks), stride):
        found.append(_Segment(blocks[start : start + size], fed))
        between = blocks[start + size : start + stride]
        found += between
        kept |= set(between)
    setattr(denoiser, name, nn.ModuleList(found))
    return kept
