"""Architectures of Hugging Face's transformers as pipelines of two stages.

    python benchmarks/architectures.py [name ...]     prints a line for each
    python benchmarks/architectures.py --page docs/architectures.md

Each is built from a tiny configuration with random weights, nothing is downloaded. Two
ranks split it into two stages, take one step of 1F1B with two microbatches, and
`xpp.verify` compares outputs, loss, gradients and buffers with the unsplit model. Ranks
that fail or take too long are ended, and the next architecture gets new ones.
"""

import argparse
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architecture_table import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds

ROWS, MICROBATCHES, TIMEOUT_S = 2, 2, 600.0
KINDS = ("output", "loss", "gradient")
TEXT = """# Architectures of transformers

What becomes of the architectures of Hugging Face's transformers in `xpp.pipeline`: tiny
models with random weights are split into two stages and run on two ranks, a step of
1F1B with two microbatches, and `xpp.verify` compares outputs, loss and all gradients
with the unsplit model ([how to set one up](transformers.md)).
`python benchmarks/architectures.py --page docs/architectures.md` writes this page, with
transformers 4.57.

* **equal**: nothing differs by more than rounding, 1e-4 of a value's largest element.
* **equal, rewritten**: likewise, after what the last column says; the model as it comes
  is refused. Rewritten models give the original's outputs.
* **refused**: an error on all ranks, for the reason in the last column.

*Outputs* and *gradients* are the largest differences, *number* how many gradients were
compared, *values* how many go from stage to stage: hidden states, masks, what is
skipped. Dropout is 0 in all of them, as a comparison needs. BatchNorm is in eval mode
in ResNet, RegNet, MobileNet and SegFormer: its statistics are those of a microbatch
([how to](how-to/verify.md))."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one architecture.

    Args:
        result: "equal", "differs", or "refused" where there was an error.
        errors: Kind of value → largest difference, relative to the largest element.
        num_gradients: How many gradients were compared.
        num_crossing: How many values stage 1 takes.
        reason: What the error or the verification said.
    """

    result: str
    errors: Mapping[str, float] = field(default_factory=dict)
    num_gradients: int = 0
    num_crossing: int = 0
    reason: str = ""


def build(architecture: Architecture, *, is_rewritten: bool) -> nn.Module:
    """Make a tiny model whose forward is the same each time."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        architecture.model_type, **architecture.sizes
    )
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model: nn.Module = getattr(transformers, architecture.head).from_config(config)
    model.train(architecture.is_training)
    if not is_rewritten or architecture.rewritten is None:
        return model
    before = copy.deepcopy(model)
    architecture.rewritten(model)
    batch = architecture.batch(ROWS)
    torch.testing.assert_close(model(**batch).logits, before(**batch).logits)
    return model


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of classes, of tokens or rows."""
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def target_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return random classes, as many as the model has logits for."""
    with torch.no_grad():
        logits = copy.deepcopy(model)(**batch).logits
    return torch.randint(0, logits.shape[-1], logits.shape[:-1])


def verify(architecture: Architecture, is_rewritten: bool) -> Trial:
    """Split, take a step and compare it with the unsplit model's, on each rank."""
    dist.init_process_group("xla_pp")
    warnings.simplefilter("ignore")
    model = build(architecture, is_rewritten=is_rewritten)
    batch = architecture.batch(ROWS * MICROBATCHES)
    target = target_of(model, batch)
    try:
        pipe = xpp.pipeline(
            model,
            mb_args=(),
            mb_kwargs={name: value[:ROWS].clone() for name, value in batch.items()},
            split_spec={architecture.split: SplitPoint.BEGINNING},
        )
        stage = pipe.build_stage(dist.get_rank(), xpp.device())
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
        found = xpp.verify(model, schedule, (), target, kwargs=batch)
    except Exception as error:
        return Trial(result="refused", reason=reason_of(error))
    own = {k: [d for d in found.differences if d.what == k] for k in KINDS}
    return Trial(
        result="equal" if found.is_equal else "differs",
        errors={k: max((d.relative for d in own[k]), default=0.0) for k in KINDS},
        num_gradients=len(own["gradient"]),
        num_crossing=sum(edge.consumer == 1 for edge in pipe.stage_graph.edges),
        reason="" if found.is_equal else str(found),
    )


def reason_of(error: BaseException) -> str:
    """Return the texts of an error and of all that it comes of."""
    texts = []
    current: BaseException | None = error
    while current is not None:
        texts.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return "\n<- ".join(texts)


def try_all(
    architectures: Iterable[Architecture],
) -> Iterator[tuple[Architecture, list[Trial]]]:
    """Try each as it is, and rewritten if it is refused so."""
    with Worlds() as worlds:
        for architecture in architectures:
            trials = [trial_of(worlds, architecture, False)]
            if trials[0].result == "refused" and architecture.rewritten is not None:
                trials.append(trial_of(worlds, architecture, True))
            yield architecture, trials


def trial_of(worlds: Worlds, architecture: Architecture, is_rewritten: bool) -> Trial:
    """Run one trial in two ranks, and end those that take too long."""
    outcomes = worlds.run_outcomes(
        verify, ranks=2, args=(architecture, is_rewritten), timeout_s=TIMEOUT_S
    )
    failed = [o for o in outcomes if o.error]
    if failed:
        text = "\n".join(f"{o.error}: {o.message}\n{o.traceback}" for o in failed)
        return Trial(result="failed", reason=text)
    trial: Trial = outcomes[-1].value
    return trial


def row_of(architecture: Architecture, trials: Sequence[Trial]) -> list[str]:
    """Return a row of the page's table."""
    last = trials[-1]
    note = architecture.note if trials[0].result == "refused" else ""
    result = last.result + (", rewritten" if len(trials) > 1 else "")
    figures = ["", "", "", ""]
    if last.errors:
        figures = [f"{last.errors[k]:.0e}" for k in ("output", "gradient")]
        figures += [str(last.num_gradients), str(last.num_crossing)]
    return [architecture.model_type, f"`{architecture.split}`", result, *figures, note]


def page_of(rows: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return the page with the tables of all families."""
    header = ["", "split at", "result", "outputs", "gradients", "number", "values", ""]
    lines = [TEXT]
    for family, members in rows.items():
        lines += [f"\n## {family}\n", f"| {' | '.join(header)} |", "|---" * 8 + "|"]
        lines += [f"| {' | '.join(row)} |" for row in members]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try what is asked for; print a line for each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    chosen = [
        a for a in ARCHITECTURES if not options.names or a.model_type in options.names
    ]
    rows: dict[str, list[list[str]]] = {}
    for architecture, trials in try_all(chosen):
        row = row_of(architecture, trials)
        print(" | ".join(row), flush=True)
        for trial in trials:
            if trial.reason:
                print("   ", trial.reason[:2000].replace("\n", "\n    "), flush=True)
        rows.setdefault(architecture.family, []).append(row)
    if options.page:
        options.page.write_text(page_of(rows))


if __name__ == "__main__":
    main()
