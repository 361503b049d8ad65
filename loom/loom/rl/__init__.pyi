"""Every public name of `loom.rl` and its module."""

from loom.rl.arithmetic import Arithmetic as Arithmetic
from loom.rl.arithmetic import Characters as Characters
from loom.rl.arithmetic import arithmetic_run as arithmetic_run
from loom.rl.dataset import DatasetTask as DatasetTask
from loom.rl.generation.completions import Completion as Completion
from loom.rl.generation.generator import Generator as Generator
from loom.rl.generation.weight_client import WeightsVia as WeightsVia
from loom.rl.models.tokenizers import tokenizer_of as tokenizer_of
from loom.rl.orchestrator import Orchestrator as Orchestrator
from loom.rl.prompts import Prompt as Prompt
from loom.rl.rollouts import Rollout as Rollout
from loom.rl.rollouts import RolloutStore as RolloutStore
from loom.rl.settings import Generators as Generators
from loom.rl.settings import Lora as Lora
from loom.rl.settings import RunSummary as RunSummary
from loom.rl.settings import StepRecord as StepRecord
from loom.rl.settings import Trainers as Trainers
from loom.rl.settings import Weights as Weights
from loom.rl.task import Task as Task
from loom.rl.task import Tokenizer as Tokenizer
from loom.rl.trainer import Trainer as Trainer
from loom.rl.transformer import SmallTransformer as SmallTransformer
