"""Linear layers in the forms that a weight can take, and which of them is fastest, measured."""

from graphdecode.linear.forms import FORMS, linear_of, load_linear, register_form
from graphdecode.linear.weight_form import FormOptions, Shard, Stored, WeightForm

__all__ = [
    "FORMS",
    "FormOptions",
    "Shard",
    "Stored",
    "WeightForm",
    "linear_of",
    "load_linear",
    "register_form",
]
