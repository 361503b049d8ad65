"""What a researcher runs on named meshes: ``python meshes.py [ADDRESS]``, by default on an allocation of its own.

It prints the node and the GPUs of each process by mesh, in a line of JSON.
"""

import json
import os
import socket
import sys

import loom


class Place(loom.Actor):
    @loom.endpoint
    def tell(self):
        return [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")]


def places(mesh):
    found = mesh.spawn_procs(name="places").spawn("place", Place).tell.call().get(120)
    return [place for _, place in found.items()]


def main(address=None):
    if address is None:
        made = loom.SlurmJob(
            meshes={"trainers": {"nodes": 2, "gpus_per_node": 2}, "generators": {"nodes": 1}}, time_limit=30
        )
    else:
        made = loom.connect(address)
    with made as job:
        state = job.state()
        found = {"trainers": places(state.trainers), "generators": places(state.generators)}
        print(json.dumps({**found, "hosts": job.hosts.extent.nelements}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
