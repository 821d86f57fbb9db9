"""Links between ranks, and their file."""

import json
from pathlib import Path

import pytest
from planner_models import gpt

from torch_xla_pp.cli import main
from torch_xla_pp.planner import PlannedLink, RankLinks, make_plan
from torch_xla_pp.planner.rank_links import links_of
from torch_xla_pp.simulate import Link, Network

pytestmark = pytest.mark.pure

SLOW = PlannedLink(sender=0, receiver=1, latency_s=0.01, bytes_per_s=1e9)
OTHERS = PlannedLink(sender=None, receiver=None, latency_s=0.0, bytes_per_s=None)


def test_links_come_back_from_their_file_and_from_a_network(tmp_path: Path) -> None:
    links = RankLinks(links=(OTHERS, SLOW))
    links.to_json(tmp_path / "links.json")
    assert RankLinks.from_json(tmp_path / "links.json") == links
    network = links.network()
    assert network == Network(
        default=Link(), links={(0, 1): Link(latency_s=0.01, bytes_per_s=1e9)}
    )
    assert links_of(network) == links.links


def test_faulty_links_are_named_at_once() -> None:
    text = json.loads(RankLinks(links=(OTHERS, SLOW)).to_json())
    text["links"] = [
        {"sender": 0, "receiver": None, "latency_s": 0.0, "bytes_per_s": None},
        {"sender": 1, "receiver": 1, "latency_s": -1.0, "bytes_per_s": None},
        {"sender": 1, "receiver": 1, "latency_s": 0.0, "bytes_per_s": 0.0},
    ]
    with pytest.raises(ValueError, match="torch_xla_pp links 1") as caught:
        RankLinks.from_json(json.dumps(text) + "\n")
    for part in (
        "links[0]: expected a sender and a receiver that differ, or neither, got 0 and",
        "links[1]: expected a sender and a receiver that differ, or neither, got 1 and",
        "links[1]: expected latency_s of at least 0 and bytes_per_s above 0, got -1.0",
        "links[2]: expected latency_s of at least 0 and bytes_per_s above 0, got 0.0",
        "links: expected one from 1 to 1, got 2",
        "links: expected one with sender and receiver null, for all other pairs",
    ):
        assert part in str(caught.value)


def test_the_command_plans_with_the_links_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, links = str(tmp_path / "work.json"), str(tmp_path / "links.json")
    gpt(2, 64, 32).to_json(work)
    RankLinks(links=(OTHERS, SLOW)).to_json(links)
    options = ["plan", work, "--rows", "16", "--ranks", "2", "--replicas", "1"]
    assert main([*options, "--links", links]) == 0
    slow = RankLinks.from_json(links).network()
    plan = make_plan(work, rows=16, ranks=2, replicas=(1,), network=slow)
    assert capsys.readouterr().out == f"{plan}\n"
    # An order made for the links hides a slow one, which others cannot.
    steps = [
        make_plan(
            work, rows=16, ranks=2, replicas=(1,), schedules=("1f1b",), network=network
        ).predicted.step_s
        for network in (slow, Network())
    ]
    assert steps[0] > steps[1] + 0.01
    assert main([*options, "--links", links, "--latency", "3"]) == 1
    assert "expected --links, or --latency and --bandwidth" in capsys.readouterr().err
