"""How Sphinx builds these pages; `make docs` runs it."""

import os

# Autodoc imports the package, and with it torch_xla.
os.environ.setdefault("PJRT_DEVICE", "CPU")

project = "torch_xla_pp"
author = "the torch_xla_pp authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Pipeline parallelism over SPMD worlds for PyTorch/XLA",
    "page_width": "70em",
}

# Links such as `page.md#heading`.
myst_heading_anchors = 3

# Docstrings have code in single backticks, as Markdown has.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

# Every reference to our own names must lead somewhere; those to others are texts.
nitpicky = True
# Made and taken by the package alone.
nitpick_ignore = [
    ("py:class", "torch_xla_pp.advice.findings.Loaded"),
    ("py:class", "torch_xla_pp.checkpoint.parts.SavedStage"),
    ("py:class", "torch_xla_pp.graph.captured.Baked"),
    ("py:class", "torch_xla_pp.graph.prepare.Prepared"),
    ("py:class", "torch_xla_pp.mesh.job_axes.MeshLayout"),
    ("py:class", "torch_xla_pp.planner.parameter_rules.HasRules"),
    ("py:class", "torch_xla_pp.planner.report.ReportedPlan"),
    ("py:class", "torch_xla_pp.planner.strategies.Strategy"),
    ("py:class", "torch_xla_pp.runtime.stage_model.TracedModel"),
    ("py:class", "torch_xla_pp.simulate.routes.Routes"),
    ("py:class", "torch_xla_pp.timeline.timeline.Timeline"),
    ("py:class", "torch_xla_pp.transport.process_group.XlaPpProcessGroup"),
    ("py:class", "torch_xla_pp.transport.rendezvous.Rendezvous"),
]
nitpick_ignore_regex = [("py:.*", r"(?!torch_xla_pp\.).*")]
