"""The structure of the model: blocks, outer modules, and the flat layout of each."""

from ds_slide.model.layout import ALIGNMENT, Entry, ParameterInfo, Segment, UnitLayout, build_layout, piece
from ds_slide.model.structure import ModelStructure, UnitSpec, find_structure, parameter_numel, parameter_shape

__all__ = [
    "ALIGNMENT",
    "Entry",
    "ModelStructure",
    "ParameterInfo",
    "Segment",
    "UnitLayout",
    "UnitSpec",
    "build_layout",
    "find_structure",
    "parameter_numel",
    "parameter_shape",
    "piece",
]
