"""The models that the benchmarks train, of a GPT's blocks, and their data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 512
SIZES = {
    "small": {"width": 256, "heads": 4, "layers": 8, "length": 128},
    "large": {"width": 512, "heads": 8, "layers": 8, "length": 256},
    "long": {"width": 256, "heads": 4, "layers": 4, "length": 1024},
    # Many words, and next to nothing, for what memory does.
    "words": {"width": 256, "heads": 4, "layers": 8, "length": 128, "vocab": 1 << 15},
    "tiny": {"width": 16, "heads": 4, "layers": 8, "length": 8, "vocab": 64},
}
ROWS = 2


class Block(nn.Module):
    """A block of a transformer.

    Rows of `qkv` that lie side by side are those of one head, so that a device may have
    some of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like `x`, `(B, L, width)`."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3 * self.head_width))
        q, k, v = heads.transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Part(nn.Module):
    """One of equal stages of a GPT."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        width: int,
        heads: int,
        layers: int,
        vocab: int = VOCAB,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, width) if stage == 0 else None
        count = layers // num_stages
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(count))
        self.head = nn.Linear(width, vocab) if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens or activations; return activations or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Branches(nn.Module):
    """As MMT of GraphPipe: a branch of blocks for each input, joined by a head.

    Args:
        size: As in `SIZES`; half of the layers are in each branch.
    """

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        width, vocab = size["width"], size.get("vocab", VOCAB)
        count = size["layers"] // 2
        self.embeds = nn.ModuleList(nn.Embedding(vocab, width) for _ in "ab")
        self.branches = nn.ModuleList(
            nn.Sequential(*(Block(width, size["heads"]) for _ in range(count)))
            for _ in "ab"
        )
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Return logits, `(B, L, vocab)`."""
        pairs = zip(self.embeds, self.branches, (one, other), strict=True)
        return self.head(torch.cat([branch(e(x)) for e, branch, x in pairs], -1))


def make_part(stage: int, num_stages: int, size: dict[str, int]) -> Part:
    """Return a stage whose parameters depend on nothing but the arguments."""
    torch.manual_seed(stage)
    width, heads, layers = size["width"], size["heads"], size["layers"]
    return Part(stage, num_stages, width, heads, layers, size.get("vocab", VOCAB))


def make_batch(microbatches: int, size: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one step, each `(ROWS * microbatches, length)`."""
    torch.manual_seed(7)
    vocab = size.get("vocab", VOCAB)
    tokens = torch.randint(vocab, (ROWS * microbatches, size["length"] + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    target = target.to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1), target.reshape(-1))
