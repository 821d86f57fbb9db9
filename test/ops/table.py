"""Run torch's samples of all differentiable operators, and write docs/operators.md.

    PYTHONPATH=test python test/ops/table.py

takes some minutes and returns 1 if an operator is wrong. With names of operators it
runs these alone, and takes the others from `build/operators.json`, where results are
kept. Operators run in worker processes of one device: an abort inside XLA ends one
of them, is counted as wrong, and another one goes on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ops.samples import Unfit, cases_of, differentiable

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "operators.md"
_RESULTS = _ROOT / "build" / "operators.json"
_NAMED = re.compile(r"\b(?:aten|prims|torch)(?:\.|::)_?\w+(?:\.\w+)*")

Record = dict[str, Any]


def results_of(name: str, most: int) -> list[Record]:
    """Return what became of each case of an operator."""
    from ops.checking import judge

    results: list[Record] = []
    for case in cases_of(name, most):
        if isinstance(case, Unfit):
            results.append({"case": case.text, "kind": "unfit", "text": case.reason})
            continue
        try:
            verdict = judge(case)
        except Exception:
            # Eager cannot, mostly as rounding led out of the domain.
            continue
        kind, text = verdict.kind, verdict.text
        if kind == "refused" and not _NAMED.search(text):
            kind, text = "wrong", f"an error that names no operation: {text}"
        results.append(
            {
                "case": case.text,
                "kind": kind,
                "text": text,
                "decomposed": list(verdict.decomposed),
            }
        )
    return results


def work(names: Sequence[str], most: int) -> None:
    """Print a line of JSON as each operator begins, and as it is done."""
    from torch_xla_pp import xla_compat

    xla_compat.enable_spmd()
    for name in names:
        print(json.dumps({"begun": name}), flush=True)
        results = results_of(name, most)
        print(json.dumps({"operator": name, "results": results}), flush=True)


def run_all(names: Sequence[str], most: int, jobs: int) -> dict[str, list[Record]]:
    """Return the results of operators by name, from worker processes."""
    with ThreadPoolExecutor(jobs) as pool:
        parts = [names[i::jobs] for i in range(jobs)]
        found = pool.map(lambda part: _run_part(part, most), parts)
    merged = {name: results for part in found for name, results in part.items()}
    return {name: merged[name] for name in names}


def _run_part(names: Sequence[str], most: int) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    left = list(names)
    while left:
        code, begun = _run_worker(left, most, found)
        if begun is not None and begun not in found:
            text = f"ends the process with {code}"
            found[begun] = [{"case": "", "kind": "wrong", "text": text}]
        elif code != 0:
            raise RuntimeError(
                f"worker for {left[0]}: expected it to begin, got {code}"
            )
        left = [name for name in left if name not in found]
    return found


def _run_worker(
    names: Sequence[str], most: int, found: dict[str, list[Record]]
) -> tuple[int, str | None]:
    """Run a worker; return its exit code and the operator that it began last."""
    command = [sys.executable, __file__, "--worker", "--samples", str(most), *names]
    settings = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    begun = None
    with subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True
    ) as worker:
        for line in worker.stdout or ():
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            begun = record.get("begun", begun)
            if "operator" in record:
                found[record["operator"]] = record["results"]
                print(f"{record['operator']}: {class_of(record['results'])}")
    return worker.returncode, begun


CLASSES = ("right", "decomposed", "partly refused", "refused", "not tried", "wrong")


def class_of(results: Sequence[Record]) -> str:
    """Return what an operator is by the results of its cases."""
    kinds = {record["kind"] for record in results} - {"unfit"}
    if not kinds:
        return "not tried"
    if "wrong" in kinds:
        return "wrong"
    if kinds == {"refused"}:
        return "refused"
    if "refused" in kinds:
        return "partly refused"
    return "decomposed" if any(x.get("decomposed") for x in results) else "right"


def page_of(found: Mapping[str, list[Record]], most: int) -> str:
    """Return the text of the page."""
    by_class: dict[str, list[str]] = {name: [] for name in CLASSES}
    for name, results in found.items():
        by_class[class_of(results)].append(name)
    kinds = Counter(r["kind"] for results in found.values() for r in results)
    lines = [
        _HEAD.format(most=most),
        "| | operators of " + str(len(found)) + " |",
        "|---|---|",
        *(f"| {name} | {len(by_class[name])} |" for name in CLASSES),
        "",
        f"Of {sum(kinds.values())} cases, {kinds['right']} are right, "
        f"{kinds['random']} random and right in the mean, {kinds['refused']} refused, "
        f"{kinds['wrong']} wrong; {kinds['unfit']} have sparse or complex inputs.",
        "",
        "## Right",
        "",
        ", ".join(f"`{name}`" for name in by_class["right"]),
        "",
        *_table("Decomposed", by_class["decomposed"], found, _decomposed),
        *_table("Partly refused", by_class["partly refused"], found, _refused),
        *_table("Refused", by_class["refused"], found, _refused),
        *_table("Not tried", by_class["not tried"], found, _unfit),
        *_table("Wrong", by_class["wrong"], found, _wrong),
        *_reasons(),
    ]
    return "\n".join(lines)


_HEAD = """# Operators

What stages make of PyTorch's operators: outputs and gradients by the programs of a
stage against eager on the CPU, on torch's own samples (`OpInfo` in
`torch.testing._internal`) of all operators that have float32 gradients. Up to {most}
samples of each that differ in shapes or arguments are taken, each once as it is and
once with rounded values, for kinks and equal values. `test/ops/checking.py` says how
they are compared. `make ops` runs this and writes the page; `make test` runs some.

* **right**: all samples equal eager.
* **decomposed**: likewise, but the package computes some operation by others, as
  torch_xla 2.9 has it wrong or not at all; the last table gives the reasons.
* **partly refused**, **refused**: some or all samples raise an error that names the
  operation and the line of the model, mostly since torch_xla would run it on the host.
* **wrong**: anything else.
"""


def _table(
    title: str, names: Sequence[str], found: Mapping[str, list[Record]], describe: Any
) -> list[str]:
    if not names:
        return []
    rows = [f"| `{name}` | {describe(found[name])} |" for name in names]
    return [f"## {title}", "", "| operator | |", "|---|---|", *rows, ""]


def _decomposed(results: Iterable[Record]) -> str:
    return _codes(op for record in results for op in record.get("decomposed", ()))


def _refused(results: Sequence[Record]) -> str:
    refused = [r["text"] for r in results if r["kind"] == "refused"]
    names = _codes(map(_operation, refused))
    is_all = len(refused) == len(results)
    return names if is_all else f"{len(refused)} of {len(results)} cases: {names}"


def _operation(text: str) -> str:
    """Return the operation that an error names."""
    names: list[str] = _NAMED.findall(text)
    return next((name for name in names if name.startswith("aten")), names[0])


def _unfit(results: Sequence[Record]) -> str:
    return ", ".join(dict.fromkeys(record["text"] for record in results))


def _wrong(results: Iterable[Record]) -> str:
    wrong = [r for r in results if r["kind"] == "wrong"]
    text = f"{len(wrong)} cases, e.g. {wrong[0]['case']}: {wrong[0]['text']}"
    return text.replace("|", "\\|").replace("\n", " ")[:300]


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _reasons() -> list[str]:
    from torch_xla_pp.compile.decompositions import reasons

    rows = [f"| `{op}` | {reason} |" for op, reason in reasons().items()]
    return ["## Reasons", "", "| operation | |", "|---|---|", *rows, ""]


def _write(found: Mapping[str, list[Record]], most: int) -> None:
    """Write the page if all operators are known, from this run or the last ones."""
    known = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    known |= found
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps(known))
    names = differentiable()
    if known.keys() >= names.keys():
        _PAGE.write_text(page_of({name: known[name] for name in names}, most))


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="operators; all, and the page, if none"
    )
    parser.add_argument("--samples", type=int, default=4, help="samples per operator")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.worker:
        work(choice.names, choice.samples)
        return 0
    found = run_all(choice.names or list(differentiable()), choice.samples, choice.jobs)
    for name, results in found.items():
        if class_of(results) == "wrong":
            print(f"{name}: {_wrong(results)}")
    _write(found, choice.samples)
    return int(any(class_of(results) == "wrong" for results in found.values()))


if __name__ == "__main__":
    sys.exit(main())
