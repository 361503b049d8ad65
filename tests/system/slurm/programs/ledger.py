"""What a researcher runs: calls with a number each, which an actor in the cluster writes down as they come.

``python ledger.py ADDRESS COUNT [SESSION]``. It says what it does in lines of JSON; with SESSION it goes on where a
former program stopped.
"""

import json
import sys
from collections import deque

import loom

BOUND = 120.0
AHEAD = 32
"""Calls that are under way at most."""
EVERY = 50


class Ledger(loom.Actor):
    def __init__(self):
        self.numbers = []

    @loom.endpoint
    def write(self, number):
        self.numbers.append(number)
        return number

    @loom.endpoint
    def read(self):
        return self.numbers


def say(event, **about):
    print(json.dumps({"event": event, **about}), flush=True)


def main(address, count, session=None):
    job = loom.connect(address, session=session, persist=True, take_over=session is not None)
    if session is None:
        ledger = job.hosts.slice(hosts=0).spawn_procs(name="ledgers").spawn("ledger", Ledger)
    else:
        ledger = job.meshes["ledger"]
    begin = len(ledger.read.call_one().get(BOUND))
    say("open", session=job.session, begin=begin, hosts=job.hosts.extent.nelements)
    waiting = deque()
    for number in range(begin, count):
        waiting.append(ledger.write.call_one(number))
        if len(waiting) > AHEAD:
            answered = waiting.popleft().get(BOUND)
            if answered % EVERY == 0:
                say("answered", number=answered)
    for one in waiting:
        one.get(BOUND)
    say("ledger", numbers=ledger.read.call_one().get(BOUND))
    job.close()
    say("closed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
