"""Find out whether a pipeline fits devices that are not here."""

from torch_xla_pp.fitting.compiled_works import compile_work, one_chip
from torch_xla_pp.fitting.dump_fit import DumpFit, fit_dump
from torch_xla_pp.fitting.fit_pipeline import fit
from torch_xla_pp.fitting.fit_report import Fit, RankFit
from torch_xla_pp.fitting.stage_fit import (
    FitCollective,
    ProgramFit,
    StageFit,
    ValueBytes,
)
from torch_xla_pp.fitting.step_estimate import StepEstimate, host_link

__all__ = [
    "DumpFit",
    "Fit",
    "FitCollective",
    "ProgramFit",
    "RankFit",
    "StageFit",
    "StepEstimate",
    "ValueBytes",
    "compile_work",
    "fit",
    "fit_dump",
    "host_link",
    "one_chip",
]
