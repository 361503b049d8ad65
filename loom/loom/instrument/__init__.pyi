"""Every public name of `loom.instrument` and its module."""

from loom.instrument.lightning import LightningCallback as LightningCallback
from loom.instrument.transformers import TrainerCallback as TrainerCallback
