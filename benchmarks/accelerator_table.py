"""Which presets compile for which TPUs, without one, and a model of 70 G parameters.

    python benchmarks/accelerator_table.py --page docs/performance/accelerators.md
    python benchmarks/accelerator_table.py --models GPT --presets dp tp
    python benchmarks/accelerator_table.py --large

Needs `libtpu` (docs/how-to/fit-an-accelerator.md), and nothing runs. Every cell is a
model of `accelerator_models.py` under a preset on a rank of four chips; all programs of
its two stages are compiled. `--large` plans a model of the sizes of Llama 3 70B for 16
ranks and compiles its stages. What was found is kept in `build/accelerators.json`,
cell by cell, so that a run that was interrupted goes on; `--page` writes what is there,
and names the cells that are missing.
"""

import argparse
import functools
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_xla_pp import env

env.stand_in_for(4)

import torch  # noqa: E402
from accelerator_models import EXAMPLES, LLAMA_RULES, Example, llama_loss  # noqa: E402

import torch_xla_pp as xpp  # noqa: E402
from torch_xla_pp.accelerators import AcceleratorCompiler, Slice  # noqa: E402
from torch_xla_pp.mesh import axis_names, presets  # noqa: E402
from torch_xla_pp.schedule import gpipe, one_f_one_b  # noqa: E402
from torch_xla_pp.text import seconds_text  # noqa: E402

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
PRESETS = ("dp", "fsdp", "tp", "cp", "sp", "ep", "fsdp+tp")
# What has no sense, and what to write instead.
EXCLUDED = {
    ("GPT", "ep"): "it has no experts: `dp` is the same",
    ("Llama", "ep"): "it has no experts: `dp` is the same",
    ("spmd_pipeline", "ep"): "it has no experts: `dp` is the same",
    ("MoE", "cp"): "its tokens have no sequence: `dp` or `ep` split them",
    ("MoE", "sp"): "its tokens have no sequence: `dp` or `ep` split them",
    ("spmd_pipeline", "fsdp+tp"): "three axes of 2 need 8 chips: take `v5e:2x4`",
}
# Part of an error → what it means, and what to write instead.
REMEDIES = {
    "cannot read '{devices=[2,2,1,1,1,1]": "torch_xla shards at most five dimensions, "
    "and sums of gradients by groups of rows have six here: take `fsdp` or `tp`",
}
RESULTS = Path("build/accelerators.json")
MIB = 2**20
HEADER = ("model", "preset", "programs", "compile", "equal", "on a device", "padding")
HEADER += ("step", "waits", "collectives")
TEXT = """# Stage programs compiled for TPUs

Small models, compiled for TPUs on a machine that has none, with libtpu {version}. A
GPT, a Llama of transformers and a mixture of experts have two stages on two ranks
under 1F1B with four microbatches; `spmd_pipeline` has its two stages in one program.
A rank has four chips, all on one axis of its mesh; two by two for `fsdp+tp`, and where
there is an axis of stages.
`python benchmarks/accelerator_table.py --page
docs/performance/accelerators.md` compiles what it does not have yet and writes this.

* **programs**: of both stages, forward, loss, backward and the sum of gradients; how
  many of them compile.
* **equal**: for how many of these the compiler counts as many bytes of arguments and
  of results as our own formula, to the byte: shapes as shardings cut them, in whole
  tiles of the layouts that the compiler chose.
* **on a device**: what a rank holds at most, [as `fit` adds it
  up](../how-to/fit-an-accelerator.md); the largest padding of a program's arguments.
* **step**, **waits**: a simulated step by the compiler's cycles and published link
  speeds, and the share of all programs' time that is waiting for collectives. The
  models are tiny, so it is large. No device has confirmed any time.
* **collectives** of all programs: all-gathers (g), all-reduces (r), reduce-scatters
  (s), collective-permutes (p), all-to-alls (a).
"""
LETTERS = {
    "all-gather": "g",
    "all-reduce": "r",
    "reduce-scatter": "s",
    "collective-permute": "p",
    "all-to-all": "a",
}
Cell = dict[str, Any]


def rules_of(preset: str) -> tuple[xpp.AxisRules, dict[str, int]]:
    """Return a preset, and the axes that it needs with their number of chips."""
    if preset == "fsdp+tp":
        both = presets.mix(presets.fsdp("data"), presets.tp("model"))
        return both, {"data": 2, "model": 2}
    rules = getattr(presets, preset)()
    named = [*rules.axes.values(), *rules.parameter_axes.values()]
    (axis,) = dict.fromkeys(name for axes in named for name in axis_names(axes))
    return rules, {axis: 4}


def cell_of(model: str, preset: str, topology: str) -> Cell:
    """Compile a model under a preset, and return the figures of all its programs."""
    example: Example = EXAMPLES[model]()
    rules, mesh = rules_of(preset)
    if example.mesh:
        mesh = {**example.mesh, **dict.fromkeys(mesh, 2)}
        rules = presets.mix(example.rules, rules)
    else:
        rules |= example.rules
    order = gpipe(1, 1) if example.mesh else one_f_one_b(2, 4)
    found = xpp.fit(
        [example.model] if example.mesh else example.model,
        example.args,
        split_spec=dict(example.split_spec),
        topology=topology,
        schedule=order,
        mesh=mesh,
        sharding=rules,
        loss_fn=example.loss_fn,
        target=example.target,
        compiler=AcceleratorCompiler(Slice.parse(topology)),
    )
    return figures(found)


def tried(model: str, preset: str, topology: str) -> Cell:
    """Return a cell, or why there is none."""
    try:
        return cell_of(model, preset, topology)
    except (xpp.PipelineError, ValueError, RuntimeError) as error:
        text = first_line(str(error))
        remedies = [remedy for part, remedy in REMEDIES.items() if part in text]
        return {"refused": remedies[0] if remedies else text, "errors": []}


def figures(found: xpp.Fit) -> Cell:
    """Return what the page needs of a result."""
    programs = [program for stage in found.stages for program in stage.programs]
    good = [program for program in programs if program.values is not None]
    kinds: dict[str, int] = {}
    for one in (c for program in good for c in program.compiled.collectives):
        letter = LETTERS.get(one.kind, "?")
        kinds[letter] = kinds.get(letter, 0) + 1
    times = [program.time for program in good if program.time is not None]
    waits = sum(time.exchange_s for time in times)
    whole = sum(time.seconds for time in times)
    paddings = [p.values.argument_padding for p in good if p.values is not None]
    return {
        "programs": len(programs),
        "compile": len(good),
        "equal": sum(p.values.agrees(p.compiled) for p in good if p.values is not None),
        "bytes": max(rank.peak_bytes for rank in found.ranks),
        "padding": max(paddings, default=0),
        "step_s": found.step.step_s if found.step else None,
        "waits": waits / whole if whole else 0.0,
        "collectives": " ".join(f"{n} {letter}" for letter, n in sorted(kinds.items())),
        "errors": sorted(
            f"{p.name}: {first_line(p.compiled.error)}"
            for p in programs
            if p.compiled.error
        ),
        "version": found.compiler,
    }


def first_line(text: str) -> str:
    """Return the beginning of an error."""
    return text.splitlines()[0][:160] if text else ""


def large_model() -> tuple[Any, torch.Tensor]:
    """Return a model of the sizes of Llama 3 70B, and tokens, both on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return model, torch.zeros(1, 4096, dtype=torch.long)


def large_plan() -> Cell:
    """Plan the large model for 16 ranks of four chips."""
    start_s, _ = processor_s()
    model, tokens = large_model()
    work = xpp.trace_work(
        model,
        (tokens,),
        activations=LLAMA_RULES.activations,
        loss_fn=llama_loss,
        target=tokens,
        max_stages=16,
    )
    traced_s, _ = processor_s()
    plan = xpp.make_plan(
        work,
        rows=32,
        ranks=16,
        devices_per_rank=4,
        device="v5p",
        replicas=(1,),
        microbatches=(32,),
        schedules=("1f1b",),
        sharding=("tp",),
        meshes=((1, 4),),
        remat=("full",),
    )
    planned_s, _ = processor_s()
    return {
        "trace_s": traced_s - start_s,
        "plan_s": planned_s - traced_s,
        "parameters": sum(p.numel() for p in model.parameters()),
        "lines": str(plan).split("\n\n")[:2],
        "plan": plan.to_json(),
        "errors": [],
    }


def large(plan: xpp.PipelinePlan) -> Cell:
    """Compile the stages of the large model."""
    own_s, children_s = processor_s()
    model, tokens = large_model()
    topology = Slice.parse("v5p:2x2x1")
    # With answers of an earlier run the compiler would take no time.
    with tempfile.TemporaryDirectory() as cache:
        found = xpp.fit(
            model,
            (tokens,),
            topology=str(topology),
            schedule=plan.table(),
            mesh={"model": 4},
            sharding=presets.tp("model") | LLAMA_RULES,
            loss_fn=llama_loss,
            target=tokens,
            remat="full",
            plan=plan,
            compiler=AcceleratorCompiler(topology, cache=Path(cache)),
        )
    fitted_s, compiled_s = processor_s()
    return {
        **figures(found),
        "lines": str(found).splitlines()[: 3 + len(found.ranks)],
        "fit_s": fitted_s - own_s,
        "compile_s": compiled_s - children_s,
    }


def processor_s() -> tuple[float, float]:
    """Return processor time of this process, and of those that it has waited for."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), found.ru_utime + found.ru_stime


def page(known: Mapping[str, Cell]) -> Iterator[str]:
    """Yield the lines of the page, with all cells of the whole table."""
    versions = sorted({cell["version"] for cell in known.values() if "version" in cell})
    yield TEXT.replace("{version}", ", ".join(versions))
    missing = []
    for topology in TOPOLOGIES:
        yield f"\n## {topology}\n"
        yield f"| {' | '.join(HEADER)} |"
        yield "|---" * len(HEADER) + "|"
        for model in EXAMPLES:
            for preset in PRESETS:
                if (model, preset) in EXCLUDED:
                    reason = EXCLUDED[model, preset]
                    yield f"| {model} | {preset} | not tried: {reason} | | | | | | | |"
                    continue
                cell = known.get(key(model, preset, topology))
                if cell is None:
                    missing.append(f"{model} {preset} on {topology}")
                    yield f"| {model} | {preset} | not run | | | | | | | |"
                    continue
                yield f"| {model} | {preset} | {row(cell)} |"
    faults = {e for cell in known.values() for e in cell["errors"]}
    if faults:
        yield "\n## What does not compile\n"
        yield from (f"* {fault}" for fault in sorted(faults))
    if missing:
        yield f"\nNot run: {', '.join(missing)}."
    if "large plan" in known:
        yield from large_lines(known["large plan"], known.get("large"))


def row(cell: Cell) -> str:
    """Return a cell's figures."""
    if "refused" in cell:
        return f"no: {cell['refused']} | | | | | | | "
    cells = [str(cell[name]) for name in ("programs", "compile", "equal")]
    cells += [f"{cell['bytes'] / MIB:,.1f} MiB", f"{cell['padding'] / 1024:,.1f} KiB"]
    cells.append("" if cell["step_s"] is None else seconds_text(cell["step_s"]))
    return " | ".join([*cells, f"{cell['waits']:.0%}", cell["collectives"]])


def large_lines(planned: Cell, compiled: Cell | None) -> Iterator[str]:
    """Yield what became of the large model."""
    yield f"""
## {planned["parameters"] / 1e9:.1f} G parameters on 64 chips

A model of the sizes of Llama 3 70B (80 layers of width 8192, 128,256 words, bfloat16)
on meta, 32 microbatches of 1 x 4096 tokens, `remat` full, for 16 ranks of v5p:2x2x1
under `tp`. Tracing its work took {planned["trace_s"]:.0f} s of processor time, planning
{planned["plan_s"]:.1f} s, by rooflines:

```text"""
    yield "\n\n".join(planned["lines"])
    yield "```\n"
    if compiled is None:
        yield (
            "Its stages are not compiled yet: `python benchmarks/accelerator_table.py "
            "--large` does that."
        )
        return
    yield f"""{compiled["compile"]} of {compiled["programs"]} programs compile, equal
ones once, and for {compiled["equal"]} of them bytes of arguments and results equal our
own formula. Processor time: {compiled["fit_s"]:.0f} s to trace and write all programs,
{compiled["compile_s"]:.0f} s to compile them one after the other.

```text"""
    yield from compiled["lines"]
    yield "```"


def key(model: str, preset: str, topology: str) -> str:
    """Return the name of a cell."""
    return f"{model} {preset} {topology}"


def main() -> None:
    """Compile what is missing, print it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--presets", nargs="*", default=PRESETS)
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--large", action="store_true", help="the large model alone")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--page", type=Path, help="write this page")
    options = parser.parse_args()
    os.nice(10)
    known: dict[str, Cell] = {}
    if RESULTS.is_file():
        known = json.loads(RESULTS.read_text())
    for name, make in wanted(options):
        if name not in known or options.again:
            known[name] = make()
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(known, indent=1))
        cell = known[name]
        text = row(cell) if "bytes" in cell or "refused" in cell else "done"
        print(f"{name}: {text}", *cell["errors"], flush=True)
    if options.page:
        options.page.write_text("\n".join(page(known)) + "\n")


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the name of each cell that is asked for, and what makes it."""
    if options.large:
        yield "large plan", large_plan
        known = json.loads(RESULTS.read_text())
        plan = xpp.PipelinePlan.from_json(known["large plan"]["plan"])
        yield "large", functools.partial(large, plan)
        return
    for topology in options.topologies:
        for model in options.models:
            for preset in options.presets:
                if (model, preset) not in EXCLUDED:
                    yield (
                        key(model, preset, topology),
                        functools.partial(tried, model, preset, topology),
                    )


if __name__ == "__main__":
    main()
