"""Another GPU than the one measured: data sheets, a cost model, and its error."""

from simulator.hardware.formats import FORMATS, SHAPES, ModelShape, WeightFormat, find_format
from simulator.hardware.record import check_published, published_error
from simulator.hardware.roofline import Observation, Roofline, observations
from simulator.hardware.scaling import (
    CALIBRATE,
    bounds_of,
    bounds_words,
    carry_over,
    fit_table,
    interval_words,
    scaling_error,
    scaling_words,
)
from simulator.validation import check_recording
from traces.operators.devices import DEVICES, Device, find_device

__all__ = [
    "CALIBRATE",
    "DEVICES",
    "FORMATS",
    "SHAPES",
    "Device",
    "ModelShape",
    "Observation",
    "Roofline",
    "WeightFormat",
    "bounds_of",
    "bounds_words",
    "carry_over",
    "check_published",
    "check_recording",
    "find_device",
    "find_format",
    "fit_table",
    "interval_words",
    "observations",
    "published_error",
    "scaling_error",
    "scaling_words",
]
