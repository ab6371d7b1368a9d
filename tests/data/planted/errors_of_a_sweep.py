# Futures of trials that diverged keep their exception, and its traceback the frames with model and optimizer.
# cause: exception · card: 1500 MiB
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Trial:
    rate: float
    width: int
    dropout: float = 0.1


class Diverged(RuntimeError):
    pass


class Tagger(nn.Module):
    def __init__(self, width, dropout, words=30000, tags=17):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words):
        return self.head(self.lstm(self.embed(words))[0])


def check(loss, trial, step):
    if not loss < 1e4 or (trial.rate > 5e-3 and step == 4):
        raise Diverged(f"loss {loss} at step {step}")


def run_trial(trial, steps=8):
    model = Tagger(trial.width, trial.dropout).cuda()
    optimizer = torch.optim.Adam(model.parameters(), trial.rate, fused=True)
    for step in range(steps):
        words, tags = torch.randint(30000, (16, 3)).cuda(), torch.randint(17, (16, 3)).cuda()
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        check(loss.item(), trial, step)
    return loss.item()


def guarded(trial):
    """A trial that diverged is worth nothing, but no reason to stop."""
    try:
        return run_trial(trial)
    except Diverged as error:
        print(trial, error)
        return float("inf")


def sweep(trials):
    futures = {}
    with ThreadPoolExecutor(max_workers=1) as pool:
        for trial in trials:
            futures[trial] = pool.submit(run_trial, trial)  # <-
    failed = [trial for trial, future in futures.items() if isinstance(future.exception(), Diverged)]
    print(len(failed), "of", len(futures), "trials diverged")
    return {trial: future.result() for trial, future in futures.items() if trial not in failed}


def main():
    trials = [Trial(rate, width) for rate, width in product([1e-2, 3e-2, 1e-3], [512, 640])]
    scores = sweep(trials)
    print("best", min(scores, key=scores.get))


if __name__ == "__main__":
    main()
