"""Plans of faults: their parts, their files, and their expectations."""

from loom.extras import require

require({"pydantic": "pydantic", "yaml": "pyyaml"}, "a plan of faults", "chaos")

from loom.chaos.plans.files import read_plan  # noqa: E402
from loom.chaos.plans.plan import Mark, Plan, PlannedFault, When  # noqa: E402
from loom.chaos.targets import Target  # noqa: E402

__all__ = ["Mark", "Plan", "PlannedFault", "Target", "When", "read_plan"]
