"""A sequence over several ranks: every rank has some of its rows, and trains one model with the others.

    torchrun --nproc-per-node 4 train.py

Each step draws a sequence of tokens, shards it, and predicts the next token; attention is the only layer that looks at
other rows, so it is the only one that knows of the group. The loss is the sum over all ranks, and so are the gradients.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import annulus

VOCABULARY = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int, **sharding):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = annulus.MultiheadDilatedAttention(
            width, heads, [64, 256], [1, 4], causal=True, rotary="rotary", **sharding
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, **sharding):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads, **sharding) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def noisy(motif: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """The motif again and again, with one token in twenty wrong."""
    tokens = motif.repeat(count // motif.numel() + 1)[:count]
    wrong = torch.rand(count, generator=generator) < 0.05
    return torch.where(wrong, torch.randint(VOCABULARY, (count,), generator=generator), tokens)[None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2003)  # a prime: shards are uneven
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    tokens, ranks = options.tokens, dist.get_world_size()
    lengths = [annulus.positions(tokens, rank=rank, ranks=ranks).numel() for rank in range(ranks)]

    torch.manual_seed(0)  # the same model on every rank
    model = Model(group=group, shard_lengths=lengths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    motif = torch.randint(VOCABULARY, (50,), generator=generator)
    for step in range(options.steps):
        whole = noisy(motif, tokens + 1, generator)
        inputs = annulus.shard(whole[:, :-1], group, shard_lengths=lengths)
        targets = annulus.shard(whole[:, 1:], group, shard_lengths=lengths)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f} over {ranks} ranks of {lengths} rows", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
