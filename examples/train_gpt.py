"""Train a character-level GPT as a pipeline of SPMD worlds.

One learns the whole path from a model to training under any of torch's schedules.
The text is Python's own documentation, which every CPython ships. Lines marked
`# xpp` are all that differs from a script for GPUs.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/train_gpt.py

With `--checkpoint FOLDER` it saves every 50 steps and at the end, and goes on from
there. At the end come speed, bubble and memory, and the last line is `final val loss
X`: the mean cross-entropy per character of held-out text, in nats.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_xla_pp as xpp  # xpp
from torch_xla_pp.timeline import summarize

WIDTH, HEADS, LAYERS, LENGTH = 160, 4, 4, 64
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3 * HEADS, -1)
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def windows(text: Tensor) -> TensorDataset:
    chunks = text.unfold(0, LENGTH + 1, LENGTH)
    return TensorDataset(chunks[:, :-1], chunks[:, 1:])


def batches(data: TensorDataset, rows: int, step: int) -> Iterator[list[Tensor]]:
    """Yield batches from a step on; each epoch is shuffled by its number."""
    per_epoch = math.ceil(len(data) / rows)
    for epoch in itertools.count(step // per_epoch):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, rows, shuffle=True, generator=order)
        yield from itertools.islice(loader, step % per_epoch, None)
        step = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B", help="a class of torch, by name")
    for option, default in (("steps", 200), ("batch", 64), ("microbatches", 8)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--checkpoint", help="a folder to save into and go on from")
    args = parser.parse_args()
    if min(args.batch, args.microbatches) < 1 or args.batch % args.microbatches:
        parser.error(
            f"--microbatches {args.microbatches}: expected a divisor of {args.batch}, "
            "the rows of --batch"
        )
    name = args.schedule.removeprefix("Schedule")

    dist.init_process_group("xla_pp")  # xpp
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), xpp.device()  # xpp
    mesh = xpp.init_device_mesh("xla", (ranks, 2), mesh_dim_names=("pp", "data"))  # xpp

    if rank == 0:
        print(f"{name} on {ranks} ranks of 2 devices: tracing the model", flush=True)

    # The stages of this rank: one; or two, placed in a loop or in a V.
    num_stages, mine = ranks, [rank]
    if name in LOOPED + V_SHAPED:
        num_stages = 2 * ranks
        mine.append(rank + ranks if name in LOOPED else num_stages - 1 - rank)
    cuts = [math.ceil(i * LAYERS / num_stages) for i in range(1, num_stages)]

    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    torch.manual_seed(0)
    example = torch.zeros(args.batch // args.microbatches, LENGTH).long()
    spec = {f"layers.{i}": SplitPoint.BEGINNING for i in cuts}
    pipe = xpp.pipeline(GPT(len(alphabet)), mb_args=(example,), split_spec=spec)  # xpp
    stages = [pipe.build_stage(i, device, mesh=mesh["data"]) for i in mine]  # xpp
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    schedule = get_schedule_class(name)(
        stages[0] if len(stages) == 1 else stages, args.microbatches, loss_fn=loss_fn
    )
    is_first, is_last = 0 in mine, num_stages - 1 in mine

    def call(run: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[Any, float]:
        """Run `step` or `eval` on one batch; return the output and the loss."""
        losses: list[Tensor] = []
        target = {"target": y.to(device), "losses": losses} if is_last else {}
        output = run(*((x.to(device),) if is_first else ()), **target)
        return output, sum(loss.item() for loss in losses) / args.microbatches

    extra = {"step": 0}
    state = xpp.checkpoint.State(stages=stages, optimizer=optimizer, extra=extra)
    if args.checkpoint and (last := xpp.checkpoint.latest(args.checkpoint)):
        xpp.checkpoint.load(state, last)
    start = extra["step"]
    bar = tqdm(
        range(start, args.steps), "compiling", disable=not is_last, mininterval=1
    )
    ends = []
    drawn = batches(windows(train), args.batch, start)
    for step, (x, y) in zip(bar, drawn, strict=False):
        # The last batch of an epoch is short.
        x, y = xpp.pad_batch(schedule, x, y, rows=args.batch)  # xpp
        _, loss = call(schedule.step, x, y)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        bar.set_description("training" if len(ends) > 1 else "compiling", refresh=False)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        if args.checkpoint and ((step + 1) % 50 == 0 or step + 1 == args.steps):
            extra["step"] = step + 1
            folder = f"{args.checkpoint}/step-{step + 1}"
            xpp.checkpoint.save(state, folder, keep_last=2)

    unseen = TensorDataset(*windows(held_out)[: 4 * args.batch - 5])
    loader = DataLoader(unseen, args.batch)
    first = next(iter(loader))
    for _ in range(2):  # the first recording compiles
        with xpp.profile_step(schedule) as profile:  # xpp
            call(schedule.step, *first)
    optimizer.zero_grad()
    memory: list[Any] = [None] * ranks
    dist.all_gather_object(memory, sum(s.peak_memory().peak_bytes for s in stages))
    late = ends[len(ends) // 2 :]
    if is_last and len(late) > 1:
        speed = (len(late) - 1) * args.batch * LENGTH / (late[-1] - late[0])
        bubble = summarize(profile.timeline).bubble_share
        sizes = " + ".join(f"{size / 2**20:.1f}" for size in memory)
        print(f"{speed:,.0f} tokens/s, bubble {bubble:.1%}, {sizes} MiB on a device")
    val_loss = 0.0
    for x, y in loader:  # the last batch is short
        share = len(x) / len(unseen)
        x, y = xpp.pad_batch(schedule, x, y, rows=args.batch)  # xpp
        val_loss += share * call(schedule.eval, x, y)[1]

    # Continue held-out text: the rank of the last stage picks each next character.
    window, generator = first[0], torch.Generator().manual_seed(1)
    for _ in range(LENGTH):
        output, _ = call(schedule.eval, window, window)
        following = torch.zeros(args.batch, 1, dtype=torch.long)
        if is_last:
            odds = torch.softmax(output[:, -1].cpu() / 0.7, dim=-1)
            following = torch.multinomial(odds, 1, generator=generator)
        dist.broadcast(following, 0 if name in V_SHAPED else ranks - 1)
        window = torch.cat([window[:, 1:], following], dim=1)
    if is_last:
        print("sample:", repr("".join(alphabet[i] for i in window[0].tolist())))
        unigrams = torch.bincount(data) / len(data)
        print(f"unigram entropy {torch.special.entr(unigrams).sum():.3f}")
        print(f"final val loss {val_loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
