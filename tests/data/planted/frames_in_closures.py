# Lambdas that will write the videos later keep every rollout's frames on the card.
# cause: leak · card: 1024 MiB
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F


ENVS, HORIZON, ACTIONS = 32, 16, 6


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                     nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
        self.policy, self.value = nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, frames):
        h = self.encoder(frames)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


@dataclass
class Rollout:
    frames: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    returns: torch.Tensor


class VideoLogger:
    def __init__(self):
        self.pending = []

    def add(self, update, frames):
        clip = frames
        self.pending.append(lambda: self.write(update, clip))  # <-

    def write(self, update, clip):
        print("video", update, tuple(clip.shape))


@torch.no_grad()
def collect(net, device):
    frames = torch.randn(HORIZON, ENVS, 4, 84, 84, device=device)
    pi, value = net(frames.flatten(0, 1))
    actions = pi.sample()
    return Rollout(frames, actions, pi.log_prob(actions), value + torch.rand_like(value))


def ppo_update(net, optimizer, roll, epochs=2, batch=128, clip=0.2):
    frames = roll.frames.flatten(0, 1)
    for _ in range(epochs):
        for start in range(0, len(frames), batch):
            part = slice(start, start + batch)
            pi, value = net(frames[part])
            ratio = (pi.log_prob(roll.actions[part]) - roll.log_probs[part]).exp()
            advantage = (roll.returns[part] - value).detach()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            loss = -surrogate.mean() + 0.5 * F.mse_loss(value, roll.returns[part]) - 0.01 * pi.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(device="cuda"):
    random.seed(0)
    net = ActorCritic().to(device)
    optimizer = torch.optim.Adam(net.parameters(), 2.5e-4)
    videos = VideoLogger()
    for update in range(30):
        roll = collect(net, device)
        ppo_update(net, optimizer, roll)
        videos.add(update, roll.frames)
    for job in videos.pending:
        job()


if __name__ == "__main__":
    main()
