"""Make the README's table of figures from what benchmarks have printed.

    python benchmarks/step_time.py --schedules GPipe 1F1B ... --json > steps.jsonl
    python benchmarks/prediction.py --json > predictions.jsonl
    python benchmarks/readme_table.py steps.jsonl predictions.jsonl

Prints the table, and puts it in the place of the one in README.md that is between
the comments with `figures`. A row is one schedule with 8 microbatches that is in both
files. Ratios have the quartiles of turns beside them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spread import text_of

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- figures: benchmarks/readme_table.py -->\n", "<!-- figures: end -->\n"
MICROBATCHES = 8
HEAD = (
    "schedule",
    "step",
    "by torch.distributed.pipelining on gloo",
    "ratio",
    "predicted",
    "bubble",
    "dispatch per action",
)

Rows = Mapping[str, Mapping[str, Any]]


def rows_of(path: Path) -> Rows:
    """Return the rows of a file of JSON lines that count, by schedule."""
    found = [
        json.loads(line) for line in path.read_text().splitlines() if line[:1] == "{"
    ]
    return {
        row["schedule"]: row for row in found if row.get("microbatches") == MICROBATCHES
    }


def table_of(steps: Rows, predictions: Rows) -> str:
    """Return the table, in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD)]
    lines += [
        _line(name, step, predictions[name])
        for name, step in steps.items()
        if name in predictions
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(
    name: str, step: Mapping[str, Any], prediction: Mapping[str, Any]
) -> Sequence[str]:
    return (
        name,
        f"{step['ours_s']:.2f} s",
        f"{step['peer_s']:.2f} s",
        text_of(step, "ratio"),
        f"{prediction['error']:+.1%}".replace("-", "−").replace("%", " %"),
        f"{prediction['measured_bubble']:.1%}".replace("%", " %"),
        f"{step['dispatch_us'] / 1e3:.1f} ms",
    )


def main() -> None:
    """Make the table of the files on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path)
    parser.add_argument("predictions", type=Path)
    options = parser.parse_args()
    table = table_of(rows_of(options.steps), rows_of(options.predictions))
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    print(table, end="")


if __name__ == "__main__":
    main()
