"""The code in the docs runs and prints what the docs say."""

import re
from pathlib import Path

import pytest
from scripts import run_afresh, run_script
from torchrun import ROOT, torchrun

from torch_xla_pp.cli import main
from torch_xla_pp.testing import Worlds
from torch_xla_pp.timeline import Timeline

pytestmark = pytest.mark.worlds


def python_blocks(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def test_the_tutorial_runs_and_its_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_DUMP_DIR", str(tmp_path / "dump"))
    script, trace = tmp_path / "first.py", tmp_path / "trace.json"
    recording = python_blocks(ROOT / "docs" / "timelines.md")
    recording = recording.replace('"trace.json"', f'"{trace}"')
    before, last = python_blocks(ROOT / "docs" / "tutorial.md").rsplit("dist.", 1)
    script.write_text(f"{before}{recording}dist.{last}")
    printed = torchrun(script, ranks=2, devices=2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "output (16, 16)" in printed
    assert "0 -> 1 F" in printed
    assert "0F3" in trace.read_text()
    check_dump(tmp_path / "dump")


def check_dump(folder: Path) -> None:
    """See whether each rank has written what it made."""
    for rank in range(2):
        own = folder / f"rank{rank}"
        assert "0.out0 -> 1.in0" in (own / "stage_graph.txt").read_text()
        plan = (own / "plan.txt").read_text()
        assert (
            plan == "stage 0 on rank 0\nstage 1 on rank 1, takes from stage 0 on rank 0"
        )
        assert (own / "schedule.csv").read_text().splitlines()[0].startswith("0F0,")
        assert "all-reduce" in (own / f"stage{rank}.txt").read_text()
        assert Timeline.from_json(own / "timeline.json").num_ranks == 2
        assert any("ENTRY" in file.read_text() for file in own.glob("hlo/*.txt"))


def test_the_page_on_plans_runs(worlds: Worlds, tmp_path: Path) -> None:
    script = tmp_path / "planned.py"
    script.write_text(python_blocks(ROOT / "docs" / "plan-a-model.md"))
    printed = run_script(worlds, script, ranks=2, devices=1)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "2 ranks" in printed


def test_the_page_on_stage_graphs_runs(worlds: Worlds, tmp_path: Path) -> None:
    page = ROOT / "docs" / "stage-graphs.md"
    script = tmp_path / "graphs.py"
    script.write_text(python_blocks(page))
    printed = run_script(worlds, script, ranks=2, devices=1)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    (shown,) = re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
    assert all(line in printed for line in shown.splitlines())


def test_the_page_on_shardings_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "choose-a-sharding.md"
    script = tmp_path / "sharding.py"
    dump = f"--xla_dump_to={tmp_path}/dump{{RANK}} --xla_dump_hlo_as_text"
    flags = f"import os\nos.environ['XLA_FLAGS'] = '{dump}'.format(**os.environ)\n"
    script.write_text(flags + python_blocks(page))
    printed = run_afresh(script, ranks=2, devices=4)
    costs, moves = re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
    assert all(line in printed for line in (costs + moves).splitlines())


def test_the_page_on_simulated_steps_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "docs" / "simulate-a-step.md"
    exec(python_blocks(page), {})
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
    assert shown in printed
    (bash,) = re.findall(r"```shell\n(.*?)```", page.read_text(), re.DOTALL)
    simulate = bash.splitlines()[-1].split()[3:]
    assert main(simulate) == 0
    assert re.search(r"16 microbatches: \d+\.\d ms", printed)


def test_the_page_on_replicas_runs(worlds: Worlds, tmp_path: Path) -> None:
    script = tmp_path / "replicas.py"
    script.write_text(python_blocks(ROOT / "docs" / "replicas.md"))
    printed = run_script(worlds, script, ranks=4, devices=1)
    losses = re.findall(r"replica \d: loss ([\d.]+)", printed)
    assert len(losses) == 2
    assert len(set(losses)) == 1


def test_the_page_on_transformers_runs(worlds: Worlds, tmp_path: Path) -> None:
    script = tmp_path / "llama.py"
    script.write_text(python_blocks(ROOT / "docs" / "transformers.md"))
    printed = run_script(worlds, script, ranks=2, devices=2)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_links_in_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
