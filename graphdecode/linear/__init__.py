"""Linear layers: the weight forms, and the measured choice of the fastest."""

from graphdecode.linear.forms import FORMS, linear_of, load_linear, register_form
from graphdecode.linear.weight_form import FormOptions, Shard, Stored, WeightForm

__all__ = ["FORMS", "FormOptions", "Shard", "Stored", "WeightForm", "linear_of", "load_linear", "register_form"]
