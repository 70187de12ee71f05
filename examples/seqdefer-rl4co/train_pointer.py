"""Train RL4CO's pointer network on Gaussian cities, by REINFORCE with the mean of several tours as the baseline.

    python examples/seqdefer-rl4co/train_pointer.py --out pointer --gap 12.5
    seqdefer run tsp --predictor rl4co:pointer

The network reads the cities in the order in which they are listed, as RL4CO's does. Training stops at the gap that is
asked for; 12.5 % takes minutes on a GPU and hours on a CPU. Coordinates are not scaled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.tasks.tsp.tours import tour_lengths

N_CITIES, SHORTEST = 50, 23.8  # mean length of the shortest tours through 50 Gaussian cities
INSTANCES = 10_000  # of an epoch, drawn anew for each
BATCH, SAMPLES = 256, 8
LEARNING_RATE, DECAY = 1e-3, 0.985  # the rate falls by this factor every epoch


class Lengths:
    """The part of RL4CO's environment that its pointer network asks for."""

    @staticmethod
    def get_reward(instances: dict[str, Tensor], tours: Tensor) -> Tensor:
        return -tour_lengths(instances["locs"], tours).float()


def train(policy: Any, *, seed: int) -> Iterator[float]:
    """Train for ever; yield the gap of greedy tours in % after each epoch."""
    device = policy.embedding.device
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    judged = torch.randn(1000, N_CITIES, 2, device=device)
    while True:
        for _ in range(INSTANCES // BATCH):
            cities = torch.randn(BATCH, N_CITIES, 2, device=device).repeat_interleave(SAMPLES, 0)
            made = policy({"locs": cities}, Lengths(), phase="train", decode_type="sampling")
            reward = made["reward"].view(BATCH, SAMPLES)
            advantage = (reward - reward.mean(1, keepdim=True)).flatten()
            loss = -(advantage * made["log_likelihood"]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            greedy = policy({"locs": judged}, Lengths(), phase="test", decode_type="greedy")["reward"]
        yield 100 * (-float(greedy.mean()) / SHORTEST - 1)


def main() -> None:
    from rl4co.models.zoo import PointerNetworkPolicy
    from seqdefer_rl4co import save_policy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the policy")
    parser.add_argument("--gap", type=float, default=12.5, help="stop at this gap, in %%")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    policy = PointerNetworkPolicy().to(options.device)
    for epoch, gap in enumerate(train(policy, seed=options.seed), 1):
        sys.stderr.write(f"epoch {epoch}: gap {gap:.2f} %\n")
        if gap <= options.gap:
            break
    save_policy(policy.cpu(), options.out, scale="none")


if __name__ == "__main__":
    main()
