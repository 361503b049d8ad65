"""Print the steps of each section of a run's curve: ``python curve.py ADDRESS RUN METRIC``."""

import json
import sys

import loom

if __name__ == "__main__":
    address, name, metric = sys.argv[1:]
    (run,) = loom.runs(name, url=address)
    (curve,) = run.curves(metric).curves
    print(json.dumps([section["step"] for section in curve["sections"]]))
